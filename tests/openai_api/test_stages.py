"""Stages of a request: durations, and their place in an answer."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.openai_api import sse
from kvrelay.openai_api.stages import stages_ms, with_stages
from kvrelay.wire.engine_messages import Timing


@pytest.mark.parametrize(
    ("timing", "stages"),
    [
        (
            Timing(queue_s=0.001, prefill_s=0.02, decode_s=0.3, first_step_s=0.004),
            {"queue": 1.0, "prefill": 20.0, "first_step": 4.0, "decode": 300.0},
        ),
        (
            Timing(0.001, 0.0, 0.05, 0.2, 1 << 20, 0.002, 0.0015, 0.004, 0.0072),
            {
                "transfer": 50.0,
                "exposed": 2.0,
                "decode_queue": 1.5,
                "first_step": 4.0,
                "decode": 200.0,
                "told": 7.2,
                "transfer_bytes": 1 << 20,
            },
        ),
        (
            Timing(prefill_s=0.03, transfer_s=0.05),
            {"prefill": 30.0, "transfer": 50.0, "exposed": 0.0, "decode_queue": 0.0},
        ),
    ],
    ids=["whole", "decode leg", "decode leg that computes"],
)
def test_a_leg_has_its_stages(timing: Timing, stages: dict[str, float]) -> None:
    assert stages_ms(timing) == stages


@pytest.mark.parametrize("stream", [True, False])
def test_the_last_object_of_an_answer_gets_a_member_and_nothing_else_changes(stream: bool) -> None:
    last = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3}}
    body = msgspec.json.encode(last)
    end = sse.event(b'{"id":"x"}') + sse.event(body) + sse.DONE if stream else body
    stages, rungs = {"total": 12.3456, "queue": 0.25, "told": 3.0}, {"gpu": 2, "new": 1}
    timed = with_stages(end, stages, rungs)
    begun, _, rest = timed.partition(b',"kvrelay":')
    kvrelay, _, tail = rest.partition(b"}}")
    assert begun + tail == end
    shown = {"queue_ms": 0.25, "total_ms": 12.346}
    assert msgspec.json.decode(kvrelay + b"}}") == {**shown, "prompt": rungs}
    assert msgspec.json.encode(shown) in with_stages(end, stages, {})


def test_what_is_no_end_of_an_answer_stays_what_it_is() -> None:
    assert with_stages(b"", {"total": 1.0}, {}) == b""
    assert with_stages(sse.event(b"{}"), {"total": 1.0}, {}) == sse.event(b"{}")
