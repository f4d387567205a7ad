"""What may enter: targets, ids, and errors that repeat nobody's words in a log."""

from __future__ import annotations

import pytest

from kvrelay.openai_api.headers import slo_of_headers, trace_headers
from kvrelay.wire.errors import NotFound, RequestError
from kvrelay.wire.log_lines import shown_error


def test_targets_are_milliseconds_in_headers() -> None:
    assert slo_of_headers({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "2.5"}.get) == (0.5, 0.0025)
    assert slo_of_headers({}.get) == (None, None)


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "nan", "inf", "1e99", "x", "5" * 100, "0x10", "1_0_"]
)
def test_a_target_that_is_no_time_is_refused_by_name(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        slo_of_headers({"x-slo-tpot-ms": value}.get)
    assert caught.value.param == "x-slo-tpot-ms"


def test_only_a_trace_as_w3c_has_it_is_passed_on() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    assert trace_headers({"traceparent": parent, "tracestate": "a=1,b=2"}.get) == {
        "traceparent": parent,
        "tracestate": "a=1,b=2",
    }
    assert trace_headers({"traceparent": parent, "tracestate": "x" * 513}.get) == {
        "traceparent": parent
    }
    for odd in ("", parent + "x", parent.upper(), "00-" + "z" * 32 + parent[35:], parent + "\n"):
        assert trace_headers({"traceparent": odd, "tracestate": "a=1"}.get) == {}


def test_an_error_in_a_log_names_its_kind_and_not_what_the_client_wrote() -> None:
    shown = shown_error(RequestError("a pattern 'the secret word' is wrong", param="guided_regex"))
    assert shown == "invalid_request_error param='guided_regex' code='-'"
    assert len(shown_error(NotFound("x" * 10_000))) < 300
