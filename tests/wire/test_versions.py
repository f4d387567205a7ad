"""Version N beside N-1: which version two processes speak, what a new field does to old code,
version 1 as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer import messages
from kvrelay.kv_transfer.connector import LeaseId, PoolRegion
from kvrelay.kv_transfer.host_memory import HostFile
from kvrelay.kv_transfer.messages import (
    ChunkProgress,
    End,
    Ended,
    Follow,
    HandshakeReply,
    HandshakeRequest,
    RankCard,
    Refused,
    Renew,
    Renewed,
)
from kvrelay.router.nodes.node import HealthReport
from kvrelay.wire.config import Role
from kvrelay.wire.errors import ErrorBody
from kvrelay.wire.frames import Answer, Frame, FrameKind, Open
from kvrelay.wire.heartbeat import Heartbeat
from kvrelay.wire.outputs import Finish, Load, PromptBlocks, TokenLogprobs
from kvrelay.wire.step_costs import StepCosts
from kvrelay.wire.transfer import ChoiceSoFar, Fingerprint, KvFacts, KvTransferParams
from kvrelay.wire.versions import HANDOVER, RELEASE, Versions

RANGES = st.integers(1, 9).flatmap(
    lambda oldest: st.integers(oldest, 9).map(lambda newest: Versions(oldest, newest))
)
PRINT = Fingerprint(1, "m", "bfloat16", 16, 3, 64, 30, 0, 1, "yarn", 1)
LOAD = Load(1, 2, 3, 4, 5, 16, 7, 8, 9, 1.5, 10.5, 0.5, 0.25, 0.125, 20.5, 250.5, 11)
COSTS = StepCosts(5.5, 0.5, 0.25, -1.5, 0.125, 0.0625)
LEASE = LeaseId("r", 7)
LOGPROBS = [TokenLogprobs(5, -0.5, (5, 6), (-0.5, -1.5), 1)]
TICKET = KvTransferParams(
    do_remote_prefill=True, remote_engine_id="e", remote_block_ids=[[1, 2]], remote_request_id="r",
    remote_host="10.0.0.1", remote_port=7, tp_size=2, client_max_tokens=9, pipelined=True, created=11, part=True,
    first_index=1, generation="g", lease_epoch=3, num_tokens=20, growing=True, expires_at=12, signature="ab",
    adapter="a", adapter_digest="d", prompt_token_ids=[1], generated=[2], generated_logprobs=LOGPROBS, sent_text=4,
    finish=Finish.LENGTH, other_choices=[ChoiceSoFar(generated=[8], logprobs=LOGPROBS, sent_text=1)], seed=5,
    cached_tokens=6, prompt_logprobs=LOGPROBS,
)  # fmt: skip
FRAME = Frame(
    FrameKind.TICKET, b"x", [1], 2, TICKET, LOAD, 503, ErrorBody("m", "t"), {"queue": 1.0}, 1, LOGPROBS, Finish.STOP,
    (1, 2, 3), PromptBlocks(16, b"hash"), "PeerLost",
)  # fmt: skip
FACTS = KvFacts(PRINT, ("nixl",), "host", "10.0.0.1", 5.0, False)
REPORT = HealthReport(
    Role.DECODE,
    "m",
    leg_stream=1,
    leg_stream_newest=1,
    release=RELEASE,
    load=LOAD,
    kv=FACTS,
    costs=COSTS,
    max_gap_ms=50.5,
)
CARD = RankCard((0, 3), PoolRegion(1 << 47, 10, 4096, "cuda:1"), {"nixl": b"\0"})
ON_THE_CHANNEL = [
    HandshakeRequest("e", PRINT, ["nixl"]),
    HandshakeReply("e", "g", PRINT, [CARD], HostFile(1, 2, 3), False, ["nccl"]),
    Refused("why"),
    Renew(1.5, [LEASE]),
    Renewed(1.5, [LEASE], [LEASE]),
    End(LEASE, 3),
    Ended(3, True),
    Follow(LEASE),
    ChunkProgress(LEASE, 3, None),
]
ALL = [
    PRINT, LOAD, TICKET, FRAME, FACTS, REPORT, Open("/p", {"a": "b"}, b"c"), Answer(429, LOAD, ErrorBody("m", "t"), 3),
    Heartbeat("http://n:1", Role.PREFILL, "m", "g", LOAD, 1.0, costs=COSTS, max_gap_ms=50.5), *ON_THE_CHANNEL,
]  # fmt: skip


def of_the_future(value: Any) -> Any:
    """As a later release might write it: every struct in it has a field more, which nobody knows."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        fields = {encoded: of_the_future(getattr(value, name)) for name, encoded in names}
        if config.array_like:
            return [*([config.tag] if config.tag else []), *fields.values(), {"new": [1]}]
        tag = {config.tag_field: config.tag} if config.tag_field else {}
        return {**tag, **fields, "new": {"field": [1, "two"]}}
    if isinstance(value, list | tuple):
        return [of_the_future(each) for each in value]
    return value


@pytest.mark.parametrize("value", ALL, ids=lambda value: type(value).__name__)
def test_fields_of_later_releases_are_skipped_wherever_they_stand(value: Any) -> None:
    said = msgspec.msgpack.encode(of_the_future(value))
    assert msgspec.msgpack.decode(said, type=type(value)) == value
    if value in ON_THE_CHANNEL:
        assert messages.decode(said) == value


def test_json_of_later_releases_is_read_too() -> None:
    for value in (TICKET, REPORT):
        assert (
            msgspec.json.decode(msgspec.json.encode(of_the_future(value)), type=type(value))
            == value
        )


@given(RANGES, RANGES)
def test_both_sides_find_the_same_version_the_highest_that_both_speak(
    mine: Versions, theirs: Versions
) -> None:
    both = set(range(mine.oldest, mine.newest + 1)) & set(range(theirs.oldest, theirs.newest + 1))
    assert mine.common(theirs) == theirs.common(mine) == max(both, default=None)
    assert all(version in mine and version in theirs for version in both)


def test_the_release_is_that_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, re.M).group(1) == RELEASE  # type: ignore[union-attr]


# --- version 1, as the code had it before nodes said which versions they speak: never change what
# stands below ---


class FingerprintOf1(msgspec.Struct, frozen=True):
    protocol: int
    model: str
    kv_dtype: str
    block_tokens: int
    kv_heads: int
    head_dim: int
    layers: int
    window: int
    tp_size: int
    rope: str = ""

    def difference(self, other: FingerprintOf1) -> str | None:
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name != "tp_size":
                return f"{name} is {mine!r} here and {theirs!r} there"
        return None


class KvFactsOf1(msgspec.Struct, frozen=True):
    fingerprint: FingerprintOf1
    planes: tuple[str, ...] = ()
    host: str = ""
    address: str = ""
    lease_s: float = 0.0
    computes_prompts: bool = True


class LoadOf1(msgspec.Struct, frozen=True, array_like=True):
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    block_tokens: int = 0
    context_tokens: int = 0


class HealthReportOf1(msgspec.Struct, frozen=True):
    role: str
    model: str
    status: str = "ok"
    generation: str = ""
    load: LoadOf1 = LoadOf1()
    kv: KvFactsOf1 | None = None
    leg_stream: int = 0


class FrameOf1(msgspec.Struct, frozen=True, array_like=True):
    kind: int
    payload: bytes = b""
    token_ids: list[int] = []
    sent_text: int = 0
    params: dict[str, Any] | None = None
    load: LoadOf1 | None = None
    status: int = 200
    error: dict[str, Any] | None = None
    timing: dict[str, float] | None = None
    choice: int = 0
    logprobs: list[list[Any]] | None = None
    finish: str | None = None
    usage: tuple[int, int, int] | None = None
    blocks: tuple[int, bytes] | None = None
    kv_error: str = ""


class OpenOf1(msgspec.Struct, frozen=True, array_like=True):
    path: str
    headers: dict[str, str]
    body: bytes


class HelloOf1(msgspec.Struct, tag="hello", frozen=True):
    engine_id: str
    fingerprint: FingerprintOf1


class HeartbeatOf1(msgspec.Struct, frozen=True):
    url: str
    role: str
    model: str
    generation: str
    load: LoadOf1
    sent_at: float
    state: str = "ok"


PRINT_OF_1 = FingerprintOf1(1, "m", "bfloat16", 16, 3, 64, 30, 0, 1, "yarn")
LOAD_OF_1 = LoadOf1(1, 2, 3, 4, 5, 16, 7)
FACTS_OF_1 = KvFactsOf1(PRINT_OF_1, ("nixl",), "host", "10.0.0.1", 5.0, False)
REPORT_OF_1 = HealthReportOf1("decode", "m", load=LOAD_OF_1, kv=FACTS_OF_1, leg_stream=1)
LOGPROBS_OF_1 = [[5, -0.5, [5, 6], [-0.5, -1.5], 1]]
TICKET_OF_1 = {
    "do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_request_id": "r",
    "remote_host": "10.0.0.1", "remote_port": 7, "tp_size": 2, "client_max_tokens": 9, "pipelined": True, "created": 11,
    "part": True, "first_index": 1, "generation": "g", "lease_epoch": 3, "num_tokens": 20, "growing": True,
    "expires_at": 12, "signature": "ab", "adapter": "a", "adapter_digest": "d", "prompt_token_ids": [1],
    "generated": [2], "generated_logprobs": LOGPROBS_OF_1, "sent_text": 4, "finish": "length",
    "other_choices": [{"generated": [8], "logprobs": LOGPROBS_OF_1, "sent_text": 1}], "seed": 5, "cached_tokens": 6,
    "prompt_logprobs": LOGPROBS_OF_1,
}  # fmt: skip
ERROR_OF_1 = {"message": "m", "type": "t", "param": None, "code": None}
FRAME_OF_1 = FrameOf1(
    4, b"x", [1], 2, TICKET_OF_1, LOAD_OF_1, 503, ERROR_OF_1, {"queue": 1.0}, 1, LOGPROBS_OF_1, "stop", (1, 2, 3),
    (16, b"hash"), "PeerLost",
)  # fmt: skip
HEARTBEAT = Heartbeat("http://n:1", Role.PREFILL, "m", "g", LOAD, 1.0, costs=COSTS, max_gap_ms=50.5)
HEARTBEAT_OF_1 = HeartbeatOf1("http://n:1", "prefill", "m", "g", LOAD_OF_1, 1.0)

needs_1 = pytest.mark.skipif(
    1 not in HANDOVER,
    reason="version 1 is not spoken any more: write down the one before yours",
)


@needs_1
@pytest.mark.parametrize(
    ("said", "as_1_had_it"),
    [
        (PRINT, PRINT_OF_1),
        (LOAD, LOAD_OF_1),
        (FACTS, FACTS_OF_1),
        (REPORT, REPORT_OF_1),
        (FRAME, FRAME_OF_1),
        (Open("/p", {"a": "b"}, b"c"), OpenOf1("/p", {"a": "b"}, b"c")),
        (HEARTBEAT, HEARTBEAT_OF_1),
        (HandshakeRequest("e", PRINT, []), HelloOf1("e", PRINT_OF_1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_code_of_version_1_reads_what_is_said_today_and_the_other_way_round(
    said: Any, as_1_had_it: Any
) -> None:
    for encode, decode in _ways(said):
        plain = decode(encode(as_1_had_it), type=type(as_1_had_it))
        assert decode(encode(said), type=type(as_1_had_it)) == plain
        read = decode(encode(as_1_had_it), type=type(said))
        assert decode(encode(read), type=type(as_1_had_it)) == plain


def _ways(value: Any) -> list[tuple[Callable[[Any], bytes], Callable[..., Any]]]:
    ways: list[tuple[Callable[[Any], bytes], Callable[..., Any]]] = [
        (msgspec.msgpack.encode, msgspec.msgpack.decode)
    ]
    if isinstance(value, HealthReport):
        ways = [(msgspec.json.encode, msgspec.json.decode)]
    return ways


@needs_1
def test_a_node_of_version_1_takes_our_fingerprint_and_we_take_its() -> None:
    mine = msgspec.structs.replace(PRINT, protocol=HANDOVER.oldest, protocol_newest=HANDOVER.newest)
    heard_by_1 = msgspec.msgpack.decode(msgspec.msgpack.encode(mine), type=FingerprintOf1)
    assert PRINT_OF_1.difference(heard_by_1) is None
    theirs = msgspec.msgpack.decode(msgspec.msgpack.encode(PRINT_OF_1), type=Fingerprint)
    assert theirs.protocols == Versions(1, 1)
    assert mine.difference(theirs) is None


def test_fingerprints_pair_by_a_common_version_and_name_both_ranges_without_one() -> None:
    def speaks(oldest: int, newest: int) -> Fingerprint:
        return msgspec.structs.replace(PRINT, protocol=oldest, protocol_newest=newest)

    assert speaks(1, 2).difference(speaks(2, 3)) is None
    assert speaks(1, 1).difference(speaks(1, 2)) is None
    assert speaks(1, 0).difference(speaks(1, 2)) is None  # of version 1, which says no newest one
    assert speaks(1, 2).difference(speaks(3, 4)) == "protocol is 1 to 2 here and 3 to 4 there"
    assert speaks(3, 3).difference(speaks(1, 2)) == "protocol is 3 here and 1 to 2 there"
