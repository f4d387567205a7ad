"""What may enter: depth of bodies, targets, ids, and errors that repeat nobody's words in a log."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_api.tracing import sane_trace
from router.entry import MAX_DEPTH, check_depth, sane_id, shown_error, targets_of
from wire.errors import NotFound, RequestError

values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(st.characters(codec="utf-8"), max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('[{"\\', max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, inner), default=0)
    return 0


@settings(max_examples=30)
@given(values, st.integers(MAX_DEPTH - 12, MAX_DEPTH + 3), st.integers(0, 300))
def test_a_body_is_refused_exactly_if_it_nests_too_deeply(inner: Any, around: int, beside: int) -> None:
    value: Any = [inner, "]" * beside, [[] for _ in range(beside)]]
    for _ in range(around):
        value = {"a": value}
    body = json.dumps(value).encode()
    if depth_of(value) <= MAX_DEPTH:
        check_depth(body)
    else:
        with pytest.raises(RequestError, match="nests deeper"):
            check_depth(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"]" * 1000,
        b'"' + b'\\"' * 100_000 + b"[]" * 200,
        b"[[]]" * 100 + b'"' + b'\\"' * 500_000,
        b"[]" * 200 + b'"\\',
    ],
)
def test_what_is_no_json_passes_and_costs_little(body: bytes) -> None:
    started = time.process_time()
    check_depth(body)
    assert time.process_time() - started < 1  # it would be minutes if anything were scanned again and again


def test_targets_are_milliseconds_in_headers() -> None:
    assert targets_of({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "2.5"}.get) == (0.5, 0.0025)
    assert targets_of({}.get) == (None, None)


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e99", "x", "5" * 100, "0x10", "1_0_"])
def test_a_target_that_is_no_time_is_refused_by_name(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        targets_of({"x-slo-tpot-ms": value}.get)
    assert caught.value.param == "x-slo-tpot-ms"


@pytest.mark.parametrize(
    "wanted", ["", "a b", "x" * 129, "cmpl-___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.9:2_x", "a\nb", "é"]
)
def test_ids_with_addresses_or_anything_odd_are_none(wanted: str) -> None:
    assert not sane_id(wanted)
    assert sane_id("my.id-1:2_3")


def test_only_a_trace_as_w3c_has_it_is_passed_on() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    assert sane_trace({"traceparent": parent, "tracestate": "a=1,b=2"}.get) == {
        "traceparent": parent,
        "tracestate": "a=1,b=2",
    }
    assert sane_trace({"traceparent": parent, "tracestate": "x" * 513}.get) == {"traceparent": parent}
    for odd in ("", parent + "x", parent.upper(), "00-" + "z" * 32 + parent[35:], parent + "\n"):
        assert sane_trace({"traceparent": odd, "tracestate": "a=1"}.get) == {}


def test_an_error_in_a_log_names_its_kind_and_not_what_the_client_wrote() -> None:
    shown = shown_error(RequestError("a pattern 'the secret word' is wrong", param="guided_regex"))
    assert shown == "invalid_request_error param='guided_regex' code='-'"
    assert len(shown_error(NotFound("x" * 10_000))) < 300
