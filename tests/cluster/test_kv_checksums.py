"""Checksums of fetched KV between real processes: nothing differs on its own, and what differs is
never served.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster, attentive_model, running, tiny_body, wait_until

pytestmark = pytest.mark.cluster

FAULTS = ["flipped", "shifted", "stale"]
DEADLINE_S = 120.0


class Checked:
    """1P1D that checks every block; `trigger` lets the next READ be wrong."""

    def __init__(self, cluster: Cluster, trigger: Path) -> None:
        self.cluster, self.trigger = cluster, trigger
        (self.decode,) = cluster.of("decode")

    def ask(self, length: int, salt: str, url: str = "") -> httpx2.Response:
        prompt = [2 + (length + i * i) % 300 for i in range(length)]
        body = tiny_body(prompt)
        body |= {"cache_salt": salt, "return_token_ids": True}
        return httpx2.post(
            f"{url or self.cluster.url}/v1/completions", json=body, timeout=DEADLINE_S
        )

    def alone(self, length: int) -> Any:
        """What the decode node answers without KV from elsewhere."""
        return text(self.ask(length, "alone", self.decode.url))

    def count(self, name: str) -> float:
        return self.decode.metric(f"kvrelay_fetch_{name}_blocks_total")


def text(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    folder = tmp_path_factory.mktemp("checked")
    flags = attentive_model(folder, 2048, kv_mib=16)
    flags += ["--kv-connector=direct", "--kv-checksums=1", "--lease-s", "30"]
    flags += ["--max-num-batched-tokens=64", "--transfer-deadline-s=60"]
    trigger, fault = folder / "fault", Path(__file__).parent / "kv_fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(fault), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("KV_FAULT", str(trigger))
        with running(folder, flags=flags) as cluster:
            yield Checked(cluster, trigger)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_block_is_neither_served_nor_cached(checked: Checked, fault: str) -> None:
    length, wrong = 333, checked.count("wrong")
    right = checked.alone(length)
    checked.trigger.write_text(fault)
    answer = checked.ask(length, fault)
    assert not checked.trigger.exists()
    assert text(answer) == right
    wait_until(lambda: checked.count("wrong") == wrong + 1, "it is counted")
    assert "KvCorrupted" in checked.decode.log.read_text()
    assert text(checked.ask(length, fault)) == right
    checked.cluster.all_blocks_free()
