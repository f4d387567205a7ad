"""Which nodes can exchange KV by what they say, and which pairs are avoided for a while."""

import math

import msgspec
import pytest

from kvrelay.router.nodes.node import Node, kv_mismatch
from kvrelay.router.nodes.pool import AVOID_S, Pool
from kvrelay.router.placement import LINK_MS
from kvrelay.wire.errors import KV_CAUSES
from kvrelay.wire.transfer import Fingerprint, KvFacts

FINGERPRINT = Fingerprint(1, "m", "bfloat16", 64, 8, 128, 32, 0, 1)
FACTS = KvFacts(FINGERPRINT, ("direct", "nixl"), "host-1", "10.0.0.1")


def facts(**changes: object) -> KvFacts:
    return msgspec.structs.replace(FACTS, **changes)


def shaped(**changes: object) -> KvFacts:
    return facts(fingerprint=msgspec.structs.replace(FINGERPRINT, **changes))


LOCAL, DIRECT = facts(address="127.0.0.1"), facts(planes=("direct",))


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        (FACTS, FACTS, None),
        (None, FACTS, None),
        (FACTS, None, None),
        (shaped(tp_size=4), shaped(tp_size=1), None),
        (DIRECT, DIRECT, None),
        (DIRECT, facts(planes=("direct",), host=""), None),  # nobody knows
        (FACTS, facts(host="host-2"), None),
        (LOCAL, LOCAL, None),
        (
            shaped(kv_dtype="float32"),
            FACTS,
            "kv_dtype is 'float32' on the prefill node and 'bfloat16' on the decode node",
        ),
        (
            FACTS,
            shaped(rope="yarn"),
            "rope is '' on the prefill node and 'yarn' on the decode node",
        ),
        (
            facts(planes=("nccl",)),
            FACTS,
            "data planes are nccl on the prefill node and direct, nixl on the decode node",
        ),
        (DIRECT, facts(host="host-2"), "host-1 and the decode node on host-2"),
        (LOCAL, facts(host="host-2"), "127.0.0.1"),
    ],
)
def test_nodes_can_exchange_kv_or_what_differs_is_named_with_both_values(
    prefill: KvFacts | None, decode: KvFacts | None, why: str | None
) -> None:
    found = kv_mismatch(prefill, decode)
    assert found is None if why is None else why in (found or "")


class Pair:
    """A prefill node and two decode nodes."""

    def __init__(self) -> None:
        self.pool = Pool(["http://p"], ["http://d", "http://e"])
        self.p, self.d, self.e = self.pool.nodes

    def failed(self, now: float, cause: str = "PeerLost") -> None:
        self.pool.kv_failed(self.p, self.d, cause, now)

    def avoided(self, decode: Node, now: float) -> bool:
        return LINK_MS < self.pool.link_ms(self.p, decode, now) < math.inf


def test_a_pair_is_avoided_for_a_time_or_until_kv_comes() -> None:
    pair = Pair()
    pair.failed(0.0)
    assert pair.avoided(pair.d, AVOID_S - 0.1)
    assert not pair.avoided(pair.d, AVOID_S)
    assert not pair.avoided(pair.e, 0.0)
    pair.failed(40.0)
    pair.pool.kv_came(pair.p, pair.d)
    assert not pair.avoided(pair.d, 40.1)


@pytest.mark.parametrize("cause", KV_CAUSES)
def test_whatever_went_wrong_is_the_pairs_fault_but_not_a_lease_that_ran_out(cause: str) -> None:
    pair = Pair()
    pair.failed(0.0, cause)
    assert pair.avoided(pair.d, 1.0) == (cause != "LeaseLost")
