"""Server-sent events as clients read them."""

from __future__ import annotations

import json

from kvrelay.openai_api import sse
from kvrelay.wire.errors import RequestError


def test_an_event_is_one_line_of_data() -> None:
    assert sse.event(b'{"a":"\\n"}') == b'data: {"a":"\\n"}\n\n'


def test_an_error_is_an_event_and_the_end_of_the_stream() -> None:
    payload = sse.error_event(RequestError("no\nway", param="stop"))
    assert payload.endswith(sse.DONE)
    event = payload.removesuffix(sse.DONE)
    assert event.count(b"\n") == 2
    assert json.loads(event.removeprefix(b"data: "))["error"]["param"] == "stop"
