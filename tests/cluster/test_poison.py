"""A request that kills every node that it reaches, over real processes: two of four die, and the
others go on.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster, Process, running, tiny_body, tiny_model, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.usefixtures("nothing_is_lost"),
]

REFUSED_S = 8.0
STREAMS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("poison")
    flags = tiny_model(folder)
    fault = Path(__file__).parent / "poison_fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(fault), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("POISON_FAULT", str(folder / "fault"))
        patch.setenv("POISON_REFUSED_S", str(REFUSED_S))
        # Streams on each node, whatever the busy machine has made of its card.
        even = ["--decode-policy", "least_queue"]
        with running(folder, prefill=2, decode=2, flags=flags, router_flags=even) as ours:
            yield ours


def ask(cluster: Cluster, user: str, **fields: Any) -> httpx2.Response:
    body = tiny_body("x" * 60, user=user, **{"max_tokens": 4} | fields)
    return httpx2.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def dead(cluster: Cluster) -> list[Process]:
    return [node for node in cluster.nodes if node.popen.poll() is not None]


def outcome(cluster: Cluster, name: str) -> float:
    text = httpx2.get(f"{cluster.url}/metrics", timeout=5).text
    found = re.search(rf'poison_requests_total{{outcome="{name}"}} (\S+)', text)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("what", ["kill-http", "kill-engine"])
def test_two_nodes_die_of_it_and_then_it_reaches_none_for_a_while(
    cluster: Cluster, what: str
) -> None:
    fault, stopped, refused = (
        cluster.folder / "fault",
        outcome(cluster, "stopped"),
        outcome(cluster, "refused"),
    )
    fault.touch()
    answers: list[str] = []
    streams = [
        threading.Thread(
            target=lambda at=at: answers.append(
                ask(cluster, f"{at}", stream=True, max_tokens=100).text
            ),
            daemon=True,
        )
        for at in range(STREAMS)
    ]
    for stream in streams:
        stream.start()
    wait_until(lambda: all(node.at_work() for node in cluster.of("decode")), 30, "the streams run")
    answer = ask(cluster, what)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poison_request")
    wait_until(lambda: len(dead(cluster)) == 2, 15, "the processes of both nodes have ended")
    again = ask(cluster, what)
    assert (again.status_code, again.json()["error"]["code"]) == (503, "poison_request")
    assert 1 <= int(again.headers["retry-after"]) <= REFUSED_S
    assert ask(cluster, "another").status_code == 200
    for stream in streams:
        stream.join(60)
    assert len(answers) == STREAMS
    assert all(
        text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text for text in answers
    )
    assert len(dead(cluster)) == 2
    assert (outcome(cluster, "stopped"), outcome(cluster, "refused")) == (stopped + 1, refused + 1)
    cluster.wait_ready(*map(cluster.restart, dead(cluster)))
    fault.unlink()  # its cause is mended
    wait_until(
        lambda: ask(cluster, what).status_code == 200, 2 * REFUSED_S, "it may come again", 0.5
    )
    assert dead(cluster) == []
