"""JSON bodies: their limits, errors that name a field, and long ones off the event loop."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.openai_api.body import decode_chat
from kvrelay.openai_api.dialects.anthropic import translate_messages
from kvrelay.openai_api.json_body import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_STRINGS,
    MAX_VALUES,
    check_node_body,
    check_shape,
    off_loop,
)
from kvrelay.wire.errors import BodyTooLarge, RequestError
from tests.commands import output_of
from tests.openai_api.answers import translated

values = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(st.characters(codec="utf-8"), max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text('[{"\\', max_size=5), inner, max_size=3),
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
def test_a_body_is_refused_exactly_if_it_nests_too_deeply(
    inner: Any, around: int, beside: int
) -> None:
    value: Any = [inner, "]" * beside, [[] for _ in range(beside)]]
    for _ in range(around):
        value = {"a": value}
    body = json.dumps(value).encode()
    if depth_of(value) <= MAX_DEPTH:
        check_shape(body)
    else:
        with pytest.raises(RequestError, match="nests deeper"):
            check_shape(body)


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
    check_shape(body)
    assert (
        time.process_time() - started < 1
    )  # it would be minutes if anything were scanned again and again


@pytest.mark.parametrize(
    ("unit", "most", "words"),
    [
        ("[]", MAX_CONTAINERS - 1, f"more than {MAX_CONTAINERS} objects and lists"),
        ("{}", MAX_CONTAINERS - 1, f"more than {MAX_CONTAINERS} objects and lists"),
        ('"a"', MAX_STRINGS, f"more than {MAX_STRINGS} keys and texts"),
        ('"[{"', MAX_STRINGS, f"more than {MAX_STRINGS} keys and texts"),
        ('"a,"', MAX_STRINGS, f"more than {MAX_STRINGS} keys and texts"),
        ("7", MAX_VALUES, f"more than {MAX_VALUES} values"),
    ],
)
def test_objects_lists_and_texts_are_counted(unit: str, most: int, words: str) -> None:
    check_shape(f"[{','.join([unit] * most)}]".encode())
    with pytest.raises(RequestError, match=words):
        check_shape(f"[{','.join([unit] * (most + 1))}]".encode())


def test_depth_is_counted_from_piece_to_piece() -> None:
    level, many = b'{"a":["[[",', b'"x",' * 5000
    check_shape(level * (MAX_DEPTH // 2) + many)
    with pytest.raises(RequestError, match="nests deeper"):
        check_shape(level * (MAX_DEPTH // 2) + many + b"[")
    check_shape((level + many + b"1]},") * 50 + b"[]" * 100)


@pytest.mark.parametrize("unit", ["]", '{"a":', '{"a":"b"},', "[", '"\\"[",', '"[]",'])
def test_the_largest_bodies_are_looked_at_in_no_time(unit: str) -> None:
    body = ("[" * 129 + unit * ((16 << 20) // len(unit))).encode()
    began = time.process_time()
    with pytest.raises(RequestError):
        check_shape(body)
    assert time.process_time() - began < 1


def test_a_leg_is_limited_beside_what_is_handed_over() -> None:
    limit = 1 << 20
    handed_over = b'"kv_transfer_params": {"prompt_token_ids": [' + b"1," * MAX_VALUES + b"1]}"
    check_node_body(b'{"prompt": "a", ' + handed_over + b"}", limit)
    check_node_body(b'{"prompt": "a"}', limit)
    with pytest.raises(BodyTooLarge, match="beside kv_transfer_params; the limit is 1048576"):
        check_node_body(b'{"prompt": "' + b"a" * limit + b'", ' + handed_over + b"}", limit)
    lists = b"[" + b"[]," * MAX_CONTAINERS + b"[]]"
    with pytest.raises(RequestError, match="objects and lists"):
        check_node_body(b'{"stop": ' + lists + b", " + handed_over + b"}", limit)
    with pytest.raises(RequestError, match="objects and lists"):
        check_node_body(
            b'{"kv_transfer_params": ' + b"[" + b"[]," * 16 * MAX_CONTAINERS + b"[]]}", limit
        )
    with pytest.raises(RequestError, match="not valid JSON"):
        check_node_body(b"x" * (limit + 1), limit)


async def test_short_bodies_are_worked_on_at_once_and_longer_ones_on_threads() -> None:
    here = threading.get_ident()
    assert await off_loop(16 << 10, threading.get_ident) == here
    assert await off_loop((16 << 10) + 1, threading.get_ident) != here


async def test_very_long_bodies_are_worked_on_one_by_one() -> None:
    at_once, most, lock = 0, 0, threading.Lock()
    done = threading.Event()

    def work() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        done.wait(0.02)
        with lock:
            at_once -= 1

    await asyncio.gather(*(off_loop((1 << 20) + 1, work) for _ in range(5)))
    assert most == 1


BODIES = """
import os
from kvrelay.openai_api.json_body import return_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

return_large_blocks()
before = resident()
b"x" * (30 << 20)  # from now on glibc keeps what is smaller
bodies = []
for _ in range(8):
    bodies += b"x" * (8 << 20), b"x" * 100_000  # the small one stays behind it
bodies = bodies[1::2]
print((resident() - before) >> 20)
"""


def test_the_memory_of_a_freed_body_goes_back_to_the_system() -> None:
    assert int(output_of(sys.executable, "-c", BODIES)) < 8  # 30 to 80 without


_ASKED = b'"messages":[{"role":"user","content":"x"}]'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"n":0,' + _ASKED, "the body is not valid JSON"),
        (b'{"n":0,"x":' + b"[" * 120_000, "the body is not valid JSON"),
        (b'{"n":0,"x":"\xff",' + _ASKED + b"}", "the body is not valid JSON"),
        (b'{"min_p":5,"x":1e999,' + _ASKED + b"}", "the body is not valid JSON"),
        (b'{"stop":["x",""],"stop":[],' + _ASKED + b"}", "stop[1] must have at least 1 character"),
        (b'{"stop":["x",""],"stop":"x",' + _ASKED + b"}", "stop[1] must have at least 1 char"),
        (
            b'{"response_format":{"type":"x"},"response_format":null,' + _ASKED + b"}",
            "response_format.type must be one of text",
        ),
        (b'{"bad_words":["",1],"bad_words":{},' + _ASKED + b"}", "bad_words[0] must have at"),
        (b'{"logit_bias":{"5":500},' + _ASKED + b"}", "logit_bias must be at most 100.0"),
    ],
)
def test_a_wrong_value_is_a_400_whatever_follows_it(body: bytes, words: str) -> None:
    with pytest.raises(RequestError) as error:
        decode_chat(body)
    assert error.value.message.startswith(words)
    assert "got" not in error.value.message


@pytest.mark.parametrize(
    "translate",
    [
        lambda body: translate_messages(body, "m"),
        lambda body: asyncio.run(translated(body)),
    ],
)
@pytest.mark.parametrize(
    "body",
    [
        *(b'{"max_tokens":0,', b'{"token_ids":[],', b'{"input":"",', b"["),
        b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"a"}],"input":"a","\xfd":1}',
    ],
)
def test_a_broken_body_of_another_dialect_is_a_400(translate: Any, body: bytes) -> None:
    with pytest.raises(RequestError):
        translate(body)
