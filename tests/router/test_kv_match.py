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


def test_equal_nodes_can_talk_and_so_can_those_that_say_nothing() -> None:
    assert kv_mismatch(FACTS, FACTS) is None
    assert kv_mismatch(None, FACTS) is None
    assert kv_mismatch(FACTS, None) is None


def test_any_tensor_parallel_sizes_can_talk() -> None:
    assert kv_mismatch(shaped(tp_size=4), shaped(tp_size=1)) is None


@pytest.mark.parametrize(
    ("field", "mine", "theirs"),
    [
        ("model", "m", "n"),
        ("kv_dtype", "bfloat16", "float32"),
        ("block_size", 64, 16),
        ("rope", "", "yarn"),
    ],
)
def test_what_differs_is_named_with_both_values(field: str, mine: object, theirs: object) -> None:
    why = kv_mismatch(shaped(**{field: mine}), shaped(**{field: theirs}))
    assert why == f"{field} is {mine!r} on the prefill node and {theirs!r} on the decode node"


def test_a_common_data_plane_is_needed_and_direct_needs_one_host() -> None:
    why = kv_mismatch(facts(planes=("nccl",)), facts(planes=("direct", "nixl")))
    assert why == "data planes are nccl on the prefill node and direct, nixl on the decode node"
    direct = facts(planes=("direct",))
    assert kv_mismatch(direct, direct) is None
    assert "host-1 and the decode node on host-2" in (
        kv_mismatch(direct, facts(host="host-2")) or ""
    )
    assert kv_mismatch(facts(planes=("direct", "nixl")), facts(host="host-2")) is None
    assert kv_mismatch(direct, facts(planes=("direct",), host="")) is None  # nobody knows


def test_a_control_channel_on_the_loopback_is_for_one_host() -> None:
    local = facts(address="127.0.0.1")
    assert kv_mismatch(local, local) is None
    assert "127.0.0.1" in (kv_mismatch(local, facts(host="host-2")) or "")


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
