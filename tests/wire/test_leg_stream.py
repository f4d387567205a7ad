"""Messages of a leg stream, wherever the network cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.wire.errors import NodeFailed
from kvrelay.wire.frames import (
    MALFORMED,
    Frame,
    FrameKind,
    Kind,
    MessageReader,
    credit,
    credit_of,
    frame_message,
    frame_of,
    message,
)

MESSAGES = st.lists(
    st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=8
)


@given(MESSAGES, st.lists(st.integers(0, 400)))
def test_messages_come_out_as_they_went_in(
    messages: list[tuple[Kind, int, bytes]], cuts: list[int]
) -> None:
    said = b"".join(message(kind, leg, body) for kind, leg, body in messages)
    reader, at, heard = MessageReader(), 0, []
    for cut in [*sorted(min(cut, len(said)) for cut in cuts), len(said)]:
        heard += [(Kind(kind), leg, bytes(body)) for leg, kind, body in reader.feed(said[at:cut])]
        at = cut
    assert heard == messages
    assert reader.pending == 0


def test_a_message_that_is_too_long_is_refused_before_it_has_come() -> None:
    with pytest.raises(NodeFailed, match="limit is 10"):
        MessageReader(10).feed(message(Kind.FRAME, 1, bytes(11))[:9])


def test_frames_and_credit() -> None:
    frame = Frame(FrameKind.TOKENS, b"x", [1, 2], 3)
    ((leg, kind, body),) = MessageReader().feed(frame_message(7, frame))
    assert (leg, kind, frame_of(body)) == (7, Kind.FRAME, frame)
    ((leg, kind, body),) = MessageReader().feed(credit(7, 2**32 - 1))
    assert (leg, kind, credit_of(body), credit_of(b"")) == (7, Kind.CREDIT, 2**32 - 1, 0)
    for malformed in (b"\xc1", b"\x91" * 100_000 + b"\xc0"):
        with pytest.raises(MALFORMED):
            frame_of(malformed)
