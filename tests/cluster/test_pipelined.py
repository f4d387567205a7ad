"""Hand-overs that begin before the prompt is computed, among real processes: long prompts in many
small chunks.
"""

import http.client
import json
import os
import signal
import threading

import httpx2
import pytest
from real_cluster import (
    SHORT_LEASE,
    Cluster,
    Process,
    attentive_model,
    children,
    complete,
    counted,
    running,
    tiny_body,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.usefixtures("nothing_is_lost"),
]

TOKENS = 4000
LAST = 8
# 447 blocks, of which a prompt has 250: the next one takes some of its blocks.
PREFILL = ["--kv-cache-memory-bytes", str(7 << 19)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelined")
    flags = [*attentive_model(folder, 8192, kv_mib=16), "--max-num-batched-tokens=16"]
    flags += [*SHORT_LEASE, "--no-enable-prefix-caching"]
    with running(folder, prefill=2, decode=2, flags=flags, prefill_flags=PREFILL) as ours:
        yield ours


def prompt_of(seed: int) -> list[int]:
    return [2 + (seed * 7919 + i * i) % 300 for i in range(TOKENS)]


class Answer(threading.Thread):
    """One request, from its start to its text."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        super().__init__(daemon=True)
        self.body = tiny_body(prompt_of(seed), max_tokens=LAST, temperature=1, seed=5)
        self.url = f"{cluster.url}/v1/completions"
        self.answer: dict = {}
        self.start()

    def run(self) -> None:
        self.answer = httpx2.post(self.url, json=self.body, timeout=60).json()

    def text(self) -> str:
        self.join(60)
        assert not self.is_alive()
        assert self.answer["usage"]["completion_tokens"] == LAST, self.answer
        return self.answer["choices"][0]["text"]


def with_blocks(cluster: Cluster, role: str) -> Process:
    """The node of this role that has taken blocks, as soon as there is one."""

    def busy() -> Process | None:
        taken = [node for node in cluster.of(role) if node.popen.poll() is None]
        return next((node for node in taken if node.at_work()), None)

    return wait_until(busy, f"a {role} node takes blocks", interval_s=0.005)


def total(cluster: Cluster, role: str, name: str) -> float:
    """Over the nodes that live; a histogram that has seen nothing has no sum."""

    def of(node: Process) -> float:
        try:
            return node.metric(name)
        except AssertionError:
            return 0.0

    return sum(of(node) for node in cluster.of(role) if node.popen.poll() is None)


def test_nearly_all_of_a_transfer_is_hidden_behind_the_prompt(cluster):
    Answer(cluster, 1).text()
    whole = total(cluster, "decode", "kvrelay_transfer_seconds_sum")
    exposed = total(cluster, "decode", "kvrelay_transfer_exposed_seconds_sum")
    for stage in ("first_step", "decode_queue"):
        assert total(cluster, "decode", f"kvrelay_{stage}_seconds_count") > 0
    assert 0 < exposed < whole / 4, (exposed, whole)
    assert total(cluster, "decode", "kvrelay_recomputed_prompts_total") == 0


def test_what_has_come_of_a_prompt_is_not_computed_again_when_its_source_dies(cluster):
    expected = Answer(cluster, 5).text()
    names = (
        "kvrelay_fetch_kept_blocks_total",
        "vllm:prompt_tokens_total",
        "kvrelay_fetches_failed_total",
    )
    kept, computed, failed = (total(cluster, "decode", name) for name in names)
    there = {node.port: node.metric("vllm:prompt_tokens_total") for node in cluster.of("prefill")}
    answer = Answer(cluster, 5)
    victim = with_blocks(cluster, "prefill")

    def is_under_way() -> bool:
        return victim.metric("vllm:prompt_tokens_total") > there[victim.port] + TOKENS / 10

    wait_until(is_under_way, "a tenth of the prompt is computed")
    victim.kill(signal.SIGKILL)
    try:
        assert answer.text() == expected
        wait_until(
            lambda: total(cluster, "decode", names[1]) > computed,
            "the count of what was computed",
        )
        kept = total(cluster, "decode", names[0]) - kept
        assert kept * 16 > TOKENS / 20
        assert total(cluster, "decode", names[1]) - computed == TOKENS - kept * 16
        assert total(cluster, "decode", names[2]) - failed == 1
    finally:
        cluster.restored(victim)


def test_a_decode_node_that_dies_before_its_first_token_is_replaced_without_a_second_prefill(
    cluster,
):
    expected = Answer(cluster, 3).text()
    computed = total(cluster, "prefill", "vllm:prompt_tokens_total")
    here = {node.port: node.metric("vllm:prompt_tokens_total") for node in cluster.of("decode")}
    answer = Answer(cluster, 3)
    victim = with_blocks(cluster, "decode")
    victim.kill(signal.SIGKILL)
    try:
        assert answer.text() == expected
        wait_until(
            lambda: total(cluster, "prefill", "vllm:prompt_tokens_total") >= computed + TOKENS,
            "the count of a prompt",
        )
        assert total(cluster, "prefill", "vllm:prompt_tokens_total") == computed + TOKENS
        (left,) = [node for node in cluster.of("decode") if node is not victim]
        assert left.metric("vllm:prompt_tokens_total") == here[left.port]
    finally:
        cluster.restored(victim)


def test_a_decode_node_that_slept_past_its_lease_computes_instead_of_decoding_foreign_kv(cluster):
    expected = Answer(cluster, 6).text()
    lost = ["kvrelay_fetches_failed_total", "kvrelay_recomputed_prompts_total"]
    before = [total(cluster, "decode", name) for name in lost]
    expired = total(cluster, "prefill", "kvrelay_leases_expired_total")
    answer = Answer(cluster, 6)
    decode, prefill = with_blocks(cluster, "decode"), with_blocks(cluster, "prefill")
    # Its engine alone: to the router the node is there.
    (engine,) = children(decode.popen.pid, b"kvrelay.node.engine_process")
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(
            lambda: total(cluster, "prefill", "kvrelay_leases_expired_total") > expired,
            "the lease runs out",
        )
        # Another takes the blocks that it was reading; an engine silent for 20 s would be dead.
        complete(prefill.url, prompt_of(100), max_tokens=2)
    finally:
        os.kill(engine, signal.SIGCONT)
    assert answer.text() == expected
    for name, count in zip(lost, before, strict=True):
        counted(cluster.of("decode"), name, count + 1)


def test_a_client_that_leaves_while_its_prompt_is_computed_frees_both_nodes_at_once(cluster):
    client = http.client.HTTPConnection("127.0.0.1", cluster.router.port)
    body = json.dumps(tiny_body(prompt_of(4), max_tokens=LAST))
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    with_blocks(cluster, "decode")
    client.close()
    cluster.all_blocks_free()
