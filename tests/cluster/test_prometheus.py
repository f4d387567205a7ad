"""A real Prometheus (Debian's package) scrapes 2P2D under load; all queries of dashboards and
alerts work.

Skipped where it is not installed: `apt-get install prometheus`.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from queries import MONITORING, Asked, asked
from real_cluster import Cluster, complete, free_port, running, tiny_model, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        not shutil.which("prometheus"), reason="no Prometheus here (apt-get install prometheus)"
    ),
]

SCRAPES = 6
INSTANT = "6s"
"""What Grafana would put for its interval, with a scrape each second."""


@dataclass
class Prometheus:
    """The process, asked over HTTP."""

    url: str

    def ask(self, path: str, **params: str) -> Any:
        answer = httpx2.get(f"{self.url}/api/v1/{path}", params=params, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def value(self, expr: str) -> list[dict[str, Any]]:
        """The samples of a query, now."""
        return list(self.ask("query", query=expr)["result"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("scraped")
    flags = [
        *tiny_model(folder),
        "--speculative-config",
        '{"num_speculative_tokens": 2, "prompt_lookup_min": 1}',
    ]
    with running(folder, prefill=2, decode=2, flags=flags, router_flags=["--workers=2"]) as ours:
        yield ours


@pytest.fixture(scope="module")
def load(cluster: Cluster) -> Iterator[None]:
    """Streams, some in each second, until the tests are over."""
    over = threading.Event()

    def stream() -> None:
        at = 0
        while not over.wait(0.15):
            at += 1
            prompt = [5 + at % 200, *[7] * 60]
            complete(cluster.url, prompt, max_tokens=16, stream=True)

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join(60)


@pytest.fixture(scope="module")
def prometheus(
    cluster: Cluster, load: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """With the rules that operators get, and all processes of the cluster as targets."""
    assert cluster.router is not None
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    nodes = [f"127.0.0.1:{node.port}" for node in cluster.nodes]
    config = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    targets = {"kvrelay-router": [f"127.0.0.1:{cluster.router.port}"], "kvrelay-node": nodes}
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "prometheus" / "kvrelay.rules.yml", folder)
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    ours = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(
            lambda: answers(ours, process, folder / "log"), "Prometheus answers", interval_s=0.1
        )
        scraped = "min(count_over_time(kvrelay_router_requests_total[1m]))"
        wait_until(
            lambda: (found := ours.value(scraped)) and float(found[0]["value"][1]) >= SCRAPES,
            "scrapes",
            interval_s=0.2,
        )
        yield ours
    finally:
        process.terminate()
        process.wait(20)


def answers(prometheus: Prometheus, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return httpx2.get(f"{prometheus.url}/-/ready", timeout=60).status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.mark.parametrize(
    "query", [each for each in asked() if ": " in each.where], ids=lambda query: query.where
)
def test_every_query_of_the_dashboards_returns_data(prometheus: Prometheus, query: Asked) -> None:
    expr = query.expr.replace("$__rate_interval", INSTANT)

    def returns_data() -> bool:
        values = {each["value"][1] for each in prometheus.value(expr)}
        # Nobody waits here, and a quantile of nothing is no number.
        return bool(values) and ("queue_wait" in expr or values != {"NaN"})

    wait_until(returns_data, expr, interval_s=0.2)
