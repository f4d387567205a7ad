"""Work in child processes: what comes back, what each limit ends, and that nothing outlives its
caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from node_doubles import EOS, VOCAB, cpu_s, write_config

from kvrelay.node.sandbox import Sandbox, Setup
from kvrelay.wire.errors import Overloaded, RequestError, Unavailable
from kvrelay.wire.sampling import Constraint

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    sandbox = Sandbox()
    config = write_config(tmp_path)
    sandbox.open(Setup(config, "{{ messages[0].content }}", True, 100, VOCAB, [EOS]))
    yield sandbox
    await sandbox.close()


def chat(content: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def children(sandbox: Sandbox) -> list[int]:
    if sandbox._process is None:
        return []
    pid = sandbox._process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.01)


async def works(sandbox: Sandbox) -> None:
    assert await sandbox.token_ids(True, chat("ab")) == [[97, 98]]


async def endless(sandbox: Sandbox) -> asyncio.Task[list[list[int]]]:
    """Start a request that never ends; return once a child works for it."""
    before = len(children(sandbox))
    task = asyncio.create_task(sandbox.token_ids(True, chat("x", chat_template=ENDLESS)))
    await until(lambda: len(children(sandbox)) > before)
    return task


async def test_prompts_are_rendered_and_tokenized(sandbox: Sandbox) -> None:
    await works(sandbox)
    body = json.dumps({"prompt": ["a", "bc"]}).encode()
    assert await sandbox.token_ids(False, body) == [[97], [98, 99]]


async def test_a_process_whose_first_caller_leaves_early_is_not_used(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{# " + "x" * (2 << 20) + " #}"
    sandbox = Sandbox()
    sandbox.open(Setup(write_config(tmp_path), template, True, 100, VOCAB, [EOS]))
    first = asyncio.create_task(works(sandbox))
    await until(lambda: sandbox._control is not None and not sandbox._control.getblocking())
    first.cancel()
    await works(sandbox)
    await sandbox.close()


async def test_a_wrong_request_is_refused_as_it_is_elsewhere(sandbox: Sandbox) -> None:
    with pytest.raises(
        RequestError, match="no token of this model stands for more than 8"
    ) as refused:
        await sandbox.token_ids(True, chat("x" * 801))
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(RequestError, match="unclosed group") as refused:
        await sandbox.as_lark(Constraint("regex", "(", field="guided_regex"))
    assert (refused.value.param, refused.value.code) == ("guided_regex", "invalid_grammar")


async def test_a_grammar_comes_back_as_lark_and_is_compiled_once(sandbox: Sandbox) -> None:
    lark = await sandbox.as_lark(Constraint("regex", "ab", field="guided_regex"))
    assert (lark.kind, lark.field) == ("lark", "guided_regex")
    assert "/ab/" in lark.text
    await sandbox.close()
    assert await sandbox.as_lark(Constraint("regex", "ab", field="guided_regex")) is lark


SCHEMA = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)} | {"a20000": True}
TOO_MUCH = {
    "stack": Constraint("json", json.dumps({"$defs": SCHEMA, "$ref": "#/$defs/a0"})),
    "memory or time": Constraint("regex", "a?" * 60_000),
}


@pytest.mark.parametrize("constraint", TOO_MUCH.values(), ids=TOO_MUCH)
async def test_a_grammar_that_takes_too_much_is_a_400_and_nothing_else(
    sandbox: Sandbox, constraint: Constraint
) -> None:
    """Larger than the door lets in (Constraint.check), so that it is the child's limits that hold."""
    for _ in range(2):  # the second time by what is remembered
        with pytest.raises(RequestError) as refused:
            await sandbox.as_lark(constraint)
        assert (refused.value.status, refused.value.param) == (400, "response_format")
    assert await sandbox.as_lark(Constraint("regex", "ab"))
    await until(lambda: not children(sandbox))


@pytest.mark.parametrize("first", ["s", '"a text" s'])
async def test_a_grammar_whose_tokens_take_too_long_is_a_400(sandbox: Sandbox, first: str) -> None:
    """It compiles in milliseconds, and each token of an answer would take half a second of the step
    loop.
    """
    names = [f"r{i}" for i in range(390)]
    rules = [f"{name}: s X | {names[i - 1]} X" for i, name in enumerate(names)]
    text = "\n".join([f"start: {first}", f"s: X | {' | '.join(names)}", *rules, "X: /[ab]/"])
    with pytest.raises(
        RequestError, match=r"(max is 500|the limit is 30 ms)\W.*make it simpler"
    ) as refused:
        await sandbox.as_lark(Constraint("grammar", text, field="guided_grammar").check())
    assert (refused.value.status, refused.value.param, refused.value.code) == (
        400,
        "guided_grammar",
        "invalid_grammar",
    )


async def test_memory_is_limited(sandbox: Sandbox) -> None:
    with pytest.raises(RequestError, match="1024 MiB of memory"):
        await sandbox.token_ids(True, chat("x", chat_template="{{ 'a' * 10000000000 }}"))
    await works(sandbox)


async def test_time_is_limited() -> None:
    code = (
        "from kvrelay.node.sandbox import Limits; from kvrelay.node.sandbox_process import _confine\n"
        "_confine(Limits(cpu_s=1, memory_bytes=1 << 30, stack_bytes=8 << 20))\n"
        "while True: pass"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL


async def test_a_client_that_leaves_takes_the_child_along(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sandbox.token_ids(True, chat("x", chat_template=ENDLESS)))
    await until(lambda: [child for child in children(sandbox) if cpu_s(child) > 0.1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not children(sandbox))
    await works(sandbox)


async def test_children_beyond_two_wait_for_a_turn(sandbox: Sandbox) -> None:
    sandbox._start_deadline_s = 0.2
    tasks = [await endless(sandbox) for _ in range(2)]
    with pytest.raises(Overloaded) as refused:
        await sandbox.token_ids(True, chat("ab"))
    assert refused.value.status == 429
    assert await sandbox.as_lark(Constraint("regex", "ab")), "grammars have turns of their own"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await works(sandbox)


async def test_requests_that_wait_for_one_grammar_share_what_is_compiled(sandbox: Sandbox) -> None:
    grammar = Constraint("regex", "ab")
    leaves, *others = [asyncio.create_task(sandbox.as_lark(grammar)) for _ in range(9)]
    await asyncio.sleep(0)
    leaves.cancel()
    found = await asyncio.gather(*others)
    assert len({id(lark) for lark in found}) <= 2, "as many as have a turn at once"


async def test_a_killed_process_is_no_fault_of_the_request(sandbox: Sandbox) -> None:
    task = await endless(sandbox)
    assert sandbox._process is not None
    pids = [*children(sandbox), sandbox._process.pid]
    os.kill(pids[-1], signal.SIGTERM)  # is ignored
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        await task
    await works(sandbox)
