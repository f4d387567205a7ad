"""The process that forks a child for each piece of work that a request could make endless, and that
child.

A child renders and tokenizes one request's prompts, or compiles one grammar and tries it out. It
has limits of CPU time, memory and stack, and the kernel ends it when its caller hangs up: no
request costs more than that, and none outlives its client. What is sent here, and what is said of a
child that was ended, is node/sandbox.py's.

For each child the caller passes one end of a socket pair. The work comes on it, and the answer goes
back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import traceback
from collections.abc import Iterator

import msgspec

from kvrelay.node.collector import imports_are_done
from kvrelay.node.compiling import grammars_for
from kvrelay.node.sandbox_messages import (
    GRAMMAR,
    LENGTH_BYTES,
    PROMPT,
    Answer,
    Broke,
    Compile,
    Compiled,
    Limits,
    Refused,
    Setup,
    Tokenize,
    Tokenized,
    Work,
    framed,
)
from kvrelay.openai_api.body import decode_chat, decode_completion
from kvrelay.openai_api.model_formats import TOOL_FORMATS, load_plugin
from kvrelay.openai_api.prompt import Prompts
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.paged_engine.grammar import Grammars
from kvrelay.wire.errors import RequestError

__all__ = ["main"]

_MAX_COMPILED_BYTES = 32 << 20
"""The engine keeps some dozens of compiled grammars."""
_work: msgspec.msgpack.Decoder[Work] = msgspec.msgpack.Decoder(Work)


def main() -> None:
    """Fork a child for each socket that comes, until the caller hangs up."""
    for each in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # they reach the whole group or service, and a draining node needs us
        signal.signal(each, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    control = socket.socket(fileno=os.dup(0))
    setup = msgspec.msgpack.decode(_received(control), type=Setup)
    tokenizer = load_tokenizer(setup.model)
    grammars = grammars_for(tokenizer, setup.vocab_size, setup.eos_token_ids)
    if setup.tool_parser_plugin:
        load_plugin(setup.tool_parser_plugin)
    prompts = Prompts(
        tokenizer,
        setup.max_model_len,
        chat_template=setup.chat_template,
        trusts_request_templates=setup.trusts_request_templates,
        tool_format=None
        if setup.tool_call_parser == "none"
        else TOOL_FORMATS[setup.tool_call_parser],
    )
    imports_are_done()
    while True:
        _, passed, _, _ = socket.recv_fds(control, 1, 1)
        if not passed:
            return
        if os.fork() == 0:
            status = 1
            try:
                control.close()
                _serve(socket.socket(fileno=passed[0]), prompts, grammars)
                status = 0
            finally:
                os._exit(status)
        os.close(passed[0])


def _serve(caller: socket.socket, prompts: Prompts, grammars: Grammars) -> None:
    """Do one caller's work within its limits."""
    work = _work.decode(_received(caller))
    _confine(PROMPT if isinstance(work, Tokenize) else GRAMMAR)
    answer: Answer
    with _ended_with(caller):
        try:
            answer = (
                _tokenized(work, prompts)
                if isinstance(work, Tokenize)
                else _compiled(work, grammars)
            )
        except RequestError as why:
            answer = Refused(why.message, why.param, why.code)
        except MemoryError:
            os._exit(1)
        except Exception:  # noqa: BLE001 - the edge of this process: the node logs it
            answer = Broke(traceback.format_exc())
    caller.sendall(framed(msgspec.msgpack.encode(answer)))


def _tokenized(work: Tokenize, prompts: Prompts) -> Tokenized:
    request = decode_chat(work.body) if work.chat else decode_completion(work.body)
    return Tokenized(prompts.all_token_ids(request, fits=work.fits))


def _compiled(work: Compile, grammars: Grammars) -> Compiled:
    before = _memory_bytes()[1]
    grammars.try_out(work.constraint)  # which builds a good part of the automaton
    taken = _memory_bytes()[1] - before
    if taken > _MAX_COMPILED_BYTES:
        field = work.constraint.field
        raise RequestError(
            f"{field} takes {taken >> 20} MiB once it is compiled; the limit is "
            f"{_MAX_COMPILED_BYTES >> 20} MiB: make "
            "it simpler",
            param=field,
            code="invalid_grammar",
        )
    return Compiled(grammars.as_lark(work.constraint))


def _confine(limits: Limits) -> None:
    """Put the limits on this process."""
    for what, limit in (
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, _memory_bytes()[0] + limits.memory_bytes),
        (resource.RLIMIT_STACK, limits.stack_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (lower, lower))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where memory runs out all the same, this is the process to end
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print pages when they abort


@contextlib.contextmanager
def _ended_with(caller: socket.socket) -> Iterator[None]:
    """Have the kernel end this process when the caller hangs up, whatever code runs then (SIGIO)."""
    flags = fcntl.fcntl(caller, fcntl.F_GETFL)
    fcntl.fcntl(caller, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(caller, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(caller, 0)
    if poll.poll(0):  # it had hung up before
        os._exit(1)
    yield
    fcntl.fcntl(caller, fcntl.F_SETFL, flags)  # the answer being read is a signal, too


def _received(sender: socket.socket) -> bytes:
    """One message. Ends the process if the sender hangs up."""
    return _exactly(sender, int.from_bytes(_exactly(sender, LENGTH_BYTES), "big"))


def _exactly(sender: socket.socket, count: int) -> bytes:
    received = bytearray(count)
    left = memoryview(received)
    while left:
        got = sender.recv_into(left)
        if not got:
            os._exit(0)
        left = left[got:]
    return bytes(received)


def _memory_bytes() -> tuple[int, int]:
    """Virtual and resident memory of this process."""
    with open("/proc/self/statm") as statm:
        virtual, resident, *_ = statm.read().split()
    return int(virtual) * resource.getpagesize(), int(resident) * resource.getpagesize()
