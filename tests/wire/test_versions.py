"""Version N beside N-1: which version two processes speak, what a new field does to old code, what
the first release wrote.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv_transfer import messages, nccl_pairs
from kvrelay.kv_transfer.connector import LeaseId, PoolRegion
from kvrelay.kv_transfer.host_memory import HostFile
from kvrelay.kv_transfer.messages import (
    ChunkProgress,
    End,
    Ended,
    Follow,
    HandshakeReply,
    HandshakeRequest,
    LeaseCached,
    Leased,
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
from kvrelay.wire.transfer import (
    ChoiceSoFar,
    Fingerprint,
    KvFacts,
    KvTransferParams,
    Source,
    Ticket,
)
from kvrelay.wire.versions import RELEASE, Versions

RANGES = st.integers(1, 9).flatmap(
    lambda oldest: st.integers(oldest, 9).map(lambda newest: Versions(oldest, newest))
)
PRINT = Fingerprint(1, "m", "bfloat16", 16, 3, 64, 30, 0, 1, "yarn", 1)
LOAD = Load(1, 2, 3, 4, 5, 16, 7, 8, 9, 1.5, 10.5, 0.5, 0.25, 0.125, 20.5, 250.5, 11)
LEASE = LeaseId("r", 7)
LOGPROBS = [TokenLogprobs(5, -0.5, (5, 6), (-0.5, -1.5), 1)]
TICKET = KvTransferParams(
    do_remote_prefill=True, remote_engine_id="e", remote_block_ids=[[1, 2]], remote_request_id="r",
    remote_host="10.0.0.1", remote_port=7, tp_size=2, client_max_tokens=9, pipelined=True, created=11, part=True,
    first_index=1, generation="g", lease_epoch=3, num_tokens=20, growing=True, expires_at=12, signature="ab",
    adapter="a", adapter_digest="d", prompt_token_ids=[1], generated=[2], generated_logprobs=LOGPROBS, sent_text=4,
    finish=Finish.LENGTH, other_choices=[ChoiceSoFar(generated=[8], logprobs=LOGPROBS, sent_text=1)], seed=5,
    cached_tokens=6, prompt_logprobs=LOGPROBS, sources=[Source("10.0.0.2", 8, "g", 64)],
)  # fmt: skip
FRAME = Frame(
    FrameKind.TICKET, b"x", [1], 2, TICKET, LOAD, 503, ErrorBody("m", "t"), {"queue": 1.0}, 1, LOGPROBS, Finish.STOP,
    (1, 2, 3), PromptBlocks(16, b"hash"), "PeerLost",
)  # fmt: skip
FACTS = KvFacts(PRINT, ("nixl",), "host", "10.0.0.1", 5.0, False, 7, "g")
REPORT = HealthReport(
    Role.DECODE,
    "m",
    leg_stream=1,
    leg_stream_newest=1,
    release=RELEASE,
    load=LOAD,
    kv=FACTS,
    costs=StepCosts(5.5, 0.5, 0.25, -1.5, 0.125, 0.0625),
    max_gap_ms=50.5,
)
HEARTBEAT = Heartbeat("http://n:1", Role.PREFILL, "m", "g", LOAD, 1.0)
ON_THE_CHANNEL = [
    HandshakeRequest("e", PRINT, ["nixl"]),
    HandshakeReply(
        "e",
        "g",
        PRINT,
        [RankCard((0, 3), PoolRegion(1 << 47, 10, 4096, "cuda:1"), {"nixl": b"\0"})],
        HostFile(1, 2, 3),
        False,
        ["nccl"],
    ),
    Refused("why"),
    Renew(1.5, [LEASE]),
    Renewed(1.5, [LEASE], [LEASE]),
    End(LEASE, 3),
    Ended(3, True),
    Follow(LEASE),
    ChunkProgress(LEASE, 3, None),
    LeaseCached(5, "g", 2, b"h" * 16),
    Leased(5, Ticket(remote_block_ids=[[1]]), "why"),
]
ALL = [
    PRINT, LOAD, TICKET, FRAME, FACTS, REPORT, Open("/p", {"a": "b"}, b"c"), Answer(429, LOAD, ErrorBody("m", "t"), 3),
    HEARTBEAT, *ON_THE_CHANNEL,
]  # fmt: skip


def of_the_future(value: Any) -> Any:
    """As a later release might write it: every struct in it has a field more, which nobody knows."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        fields = {encoded: of_the_future(getattr(value, name)) for name, encoded in names}
        if config.array_like:
            return [*fields.values(), {"new": [1]}]
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


def test_messages_keep_the_names_that_other_releases_know() -> None:
    """Most are the names of their classes, which may change."""
    kinds = get_args(messages.Message | nccl_pairs.PairMessage)
    assert " ".join([kind.__struct_config__.tag for kind in kinds]) == (
        "hello welcome refused renew renewed end ended follow grown lease leased doubt meet ask part"
    )


@given(RANGES, RANGES)
def test_both_sides_find_the_same_version_the_highest_that_both_speak(
    mine: Versions, theirs: Versions
) -> None:
    both = [version for version in range(11) if version in mine and version in theirs]
    assert mine.common(theirs) == theirs.common(mine) == max(both, default=None)


def test_the_release_is_that_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, re.M).group(1) == RELEASE  # type: ignore[union-attr]


# What the first release wrote of these, as msgpack: never change what stands here.
RECORDED = [
    (
        PRINT,
        "8aa870726f746f636f6c01a56d6f64656ca16da86b765f6474797065a862666c6f61743136ac626c"
        "6f636b5f746f6b656e7310a86b765f686561647303a8686561645f64696d40a66c61796572731ea6"
        "77696e646f7700a774705f73697a6501a4726f7065a47961726e",
    ),
    (
        LOAD,
        "9701020304051007",
    ),
    (
        FACTS,
        "86ab66696e6765727072696e748aa870726f746f636f6c01a56d6f64656ca16da86b765f64747970"
        "65a862666c6f61743136ac626c6f636b5f746f6b656e7310a86b765f686561647303a8686561645f"
        "64696d40a66c61796572731ea677696e646f7700a774705f73697a6501a4726f7065a47961726ea6"
        "706c616e657391a46e69786ca4686f7374a4686f7374a761646472657373a831302e302e302e31a7"
        "6c656173655f73cb4014000000000000b0636f6d70757465735f70726f6d707473c2",
    ),
    (
        REPORT,
        "87a4726f6c65a66465636f6465a56d6f64656ca16da6737461747573a26f6baa67656e6572617469"
        "6f6ea0a46c6f61649701020304051007a26b7686ab66696e6765727072696e748aa870726f746f63"
        "6f6c01a56d6f64656ca16da86b765f6474797065a862666c6f61743136ac626c6f636b5f746f6b65"
        "6e7310a86b765f686561647303a8686561645f64696d40a66c61796572731ea677696e646f7700a7"
        "74705f73697a6501a4726f7065a47961726ea6706c616e657391a46e69786ca4686f7374a4686f73"
        "74a761646472657373a831302e302e302e31a76c656173655f73cb4014000000000000b0636f6d70"
        "757465735f70726f6d707473c2aa6c65675f73747265616d01",
    ),
    (
        FRAME,
        "9f04c40178910102de001db1646f5f72656d6f74655f70726566696c6cc3b072656d6f74655f656e"
        "67696e655f6964a165b072656d6f74655f626c6f636b5f69647391920102b172656d6f74655f7265"
        "71756573745f6964a172ab72656d6f74655f686f7374a831302e302e302e31ab72656d6f74655f70"
        "6f727407a774705f73697a6502b1636c69656e745f6d61785f746f6b656e7309a9706970656c696e"
        "6564c3a7637265617465640ba470617274c3ab66697273745f696e64657801aa67656e6572617469"
        "6f6ea167ab6c656173655f65706f636803aa6e756d5f746f6b656e7314a767726f77696e67c3aa65"
        "7870697265735f61740ca97369676e6174757265a26162a761646170746572a161ae616461707465"
        "725f646967657374a164b070726f6d70745f746f6b656e5f6964739101a967656e65726174656491"
        "02b267656e6572617465645f6c6f6770726f6273919505cbbfe000000000000092050692cbbfe000"
        "0000000000cbbff800000000000001a973656e745f7465787404a666696e697368a66c656e677468"
        "ad6f746865725f63686f696365739183a967656e6572617465649108a86c6f6770726f6273919505"
        "cbbfe000000000000092050692cbbfe0000000000000cbbff800000000000001a973656e745f7465"
        "787401a47365656405ad6361636865645f746f6b656e7306af70726f6d70745f6c6f6770726f6273"
        "919505cbbfe000000000000092050692cbbfe0000000000000cbbff8000000000000019701020304"
        "051007cd01f784a76d657373616765a16da474797065a174a5706172616dc0a4636f6465c081a571"
        "75657565cb3ff000000000000001919505cbbfe000000000000092050692cbbfe0000000000000cb"
        "bff800000000000001a473746f70930102039210c40468617368a8506565724c6f7374",
    ),
    (
        Open("/p", {"a": "b"}, b"c"),
        "93a22f7081a161a162c40163",
    ),
    (
        HEARTBEAT,
        "87a375726caa687474703a2f2f6e3a31a4726f6c65a770726566696c6ca56d6f64656ca16daa6765"
        "6e65726174696f6ea167a46c6f61649701020304051007a773656e745f6174cb3ff0000000000000"
        "a57374617465a26f6b",
    ),
    (
        HandshakeRequest("e", PRINT, []),
        "83a474797065a568656c6c6fa9656e67696e655f6964a165ab66696e6765727072696e748aa87072"
        "6f746f636f6c01a56d6f64656ca16da86b765f6474797065a862666c6f61743136ac626c6f636b5f"
        "746f6b656e7310a86b765f686561647303a8686561645f64696d40a66c61796572731ea677696e64"
        "6f7700a774705f73697a6501a4726f7065a47961726e",
    ),
    (  # its signature is left out here
        LeaseCached(1, "g", 0, b"h" * 16),
        "85a474797065a56c65617365a5746f6b656e01aa67656e65726174696f6ea167a5666972737400a6"
        "686173686573c41068686868686868686868686868686868",
    ),
]


@pytest.mark.parametrize(("value", "recorded"), RECORDED, ids=lambda each: type(each).__name__)
def test_what_the_first_release_wrote_is_read_and_our_own_begins_like_it(
    value: Any, recorded: str
) -> None:
    """Fields that are added at the end are skipped by old code."""
    old = bytes.fromhex(recorded)
    read = msgspec.msgpack.decode(old, type=type(value))
    theirs, again, ours = map(msgspec.msgpack.decode, (old, encode(read), encode(value)))
    assert begins_like(again, theirs)
    assert begins_like(ours, theirs)


encode = msgspec.msgpack.encode


def begins_like(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return all(name in ours and begins_like(ours[name], theirs[name]) for name in theirs)
    if isinstance(theirs, list):
        return len(ours) >= len(theirs) and all(map(begins_like, ours, theirs))
    return bool(ours == theirs)


def test_fingerprints_pair_by_a_common_version_and_name_both_ranges_without_one() -> None:
    def speaks(oldest: int, newest: int) -> Fingerprint:
        return msgspec.structs.replace(PRINT, protocol=oldest, protocol_newest=newest)

    assert speaks(1, 2).difference(speaks(2, 3)) is None
    assert speaks(1, 1).difference(speaks(1, 2)) is None
    assert speaks(1, 0).difference(speaks(1, 2)) is None  # of version 1, which says no newest one
    assert speaks(1, 2).difference(speaks(3, 4)) == "protocol is 1 to 2 here and 3 to 4 there"
    assert speaks(3, 3).difference(speaks(1, 2)) == "protocol is 3 here and 1 to 2 there"
