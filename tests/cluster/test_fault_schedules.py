"""Faults among real processes: random ones, and a decode node that sleeps past its lease.

More of the first: `python tests/cluster/fault_schedules.py --count 300`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from fault_schedules import KINDS, Asked, Faults, cluster_of_faults, prompt_of
from real_cluster import Process, children, complete, counted, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

SEEDS = range(262, 272)  # each kind of fault is among them
LONG = 4000


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    with cluster_of_faults(tmp_path_factory.mktemp("faults")) as it:
        yield it


def test_a_decode_node_that_slept_past_its_lease_computes_instead_of_decoding_foreign_kv(
    faults: Faults,
) -> None:
    undisturbed = Asked(faults.router.port, 0, LONG)
    undisturbed.join(60)
    before = {
        node.port: [node.metric(name) for name in COUNTED[node.role]]
        for node in faults.cluster.nodes
    }
    asked = Asked(faults.router.port, 0, LONG)
    decode = wait_until(
        lambda: with_blocks(faults, "decode"), 30, "a decode node takes blocks", 0.002
    )
    # Its engine alone: to the router the node is there.
    (engine,) = children(decode.popen.pid, b"kvrelay.node.engine_process")
    os.kill(engine, signal.SIGSTOP)
    try:
        prefill = wait_until(lambda: with_more(faults, before), 20, "the lease runs out")
        for number in range(100, 104):
            # Others take the blocks that it was reading.
            complete(prefill.url, prompt_of(number), max_tokens=2)
    finally:
        os.kill(engine, signal.SIGCONT)
    asked.join(60)
    assert (asked.end, asked.text) == (undisturbed.end, undisturbed.text) == ("done", asked.text)
    for name, count in zip(COUNTED["decode"], before[decode.port], strict=True):
        counted([decode], name, count + 1)
    faults.cluster.all_blocks_free()


def test_random_faults_leave_nothing_behind_and_nothing_wrong(faults: Faults) -> None:
    outcomes = [faults.run(seed) for seed in SEEDS]
    assert {outcome.kind for outcome in outcomes} >= set(KINDS) - {"cut between nodes"}


COUNTED = {
    "prefill": ["kvrelay_leases_expired_total"],
    "decode": ["kvrelay_fetches_failed_total", "kvrelay_recomputed_prompts_total"],
}


def with_blocks(faults: Faults, role: str) -> Process | None:
    """The node of this role that has taken blocks, if there is one."""
    return next((node for node in faults.cluster.of(role) if node.at_work()), None)


def with_more(faults: Faults, before: dict[int, list[float]]) -> Process | None:
    """The prefill node of which a lease has run out."""
    nodes = faults.cluster.of("prefill")
    return next(
        (n for n in nodes if [n.metric(name) for name in COUNTED["prefill"]] != before[n.port]),
        None,
    )
