"""What the last frame of a leg says of the node and of the client's next try."""

import pytest

from kvrelay.router.transport.node_errors import AttemptFailed, Refused, deliver_last
from kvrelay.wire.errors import ErrorBody
from kvrelay.wire.frames import Frame, FrameKind
from kvrelay.wire.outputs import Load


@pytest.mark.parametrize(("backlog_ms", "seconds"), [(0.0, 1), (400.0, 1), (2_100.0, 3), (1e9, 60)])
def test_a_client_is_told_when_what_waits_is_computed(backlog_ms: float, seconds: int) -> None:
    load, taken = Load(backlog_ms=backlog_ms), list[Frame]()
    for status, kind in ((429, Refused), (503, AttemptFailed)):
        frame = Frame(
            FrameKind.ERROR, error=ErrorBody("full", "overloaded_error"), status=status, load=load
        )
        with pytest.raises(kind) as told:
            deliver_last(frame, taken.append)
        assert told.value.retry_after_s == seconds
    with pytest.raises(Refused) as told:
        deliver_last(
            Frame(
                FrameKind.ERROR,
                error=ErrorBody("wrong", "invalid_request_error"),
                status=400,
                load=load,
            ),
            taken.append,
        )
    assert told.value.retry_after_s is None
    assert not taken
