"""Sandbox process: forks a child for each piece of work, and gives it limits.

The kernel ends a child when its caller hangs up.
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

from kvrelay.node.compiling import grammars_for
from kvrelay.node.process import freeze_imports
from kvrelay.node.sandbox import (
    GRAMMAR,
    LENGTH_BYTES,
    PROMPT,
    Answer,
    Limits,
    Setup,
    Work,
    framed,
)
from kvrelay.openai_api.body import decode_chat, decode_completion
from kvrelay.openai_api.prompt import Prompts
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.paged_engine.grammar import Grammars
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import Constraint

__all__ = ["main"]

# The engine keeps some dozens of compiled grammars.
_MAX_COMPILED_BYTES = 32 << 20


def main() -> None:
    # They reach the whole group, and a draining node needs this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    control = socket.socket(fileno=os.dup(0))
    setup = msgspec.msgpack.decode(_receive_message(control), type=Setup)
    tokenizer = load_tokenizer(setup.model)
    grammars = grammars_for(tokenizer, setup.vocab_size, setup.eos_token_ids)
    prompts = Prompts(
        tokenizer,
        setup.max_model_len,
        chat_template=setup.chat_template,
        trusts_request_templates=setup.trusts_request_templates,
    )
    freeze_imports()
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
    work = msgspec.msgpack.decode(_receive_message(caller), type=Work)
    _confine(PROMPT if work.constraint is None else GRAMMAR)
    with _killed_on_hangup(caller):
        try:
            if work.constraint is None:
                request = decode_chat(work.body) if work.chat else decode_completion(work.body)
                answer = Answer(prompts.token_ids(request, fits=work.fits))
            else:
                answer = Answer(constraint=_compile(work.constraint, grammars))
        except RequestError as why:
            answer = Answer(refusal=(why.message, why.param, why.code))
        except MemoryError:
            os._exit(1)
        except Exception:  # noqa: BLE001 - the edge of this process: the node logs it
            answer = Answer(traceback=traceback.format_exc())
    caller.sendall(framed(msgspec.msgpack.encode(answer)))


def _compile(constraint: Constraint, grammars: Grammars) -> Constraint:
    before = _memory_bytes()[1]
    grammars.try_out(constraint)  # which builds a good part of the automaton
    taken = _memory_bytes()[1] - before
    if taken > _MAX_COMPILED_BYTES:
        field = constraint.field
        raise RequestError(
            f"{field} takes {taken >> 20} MiB once it is compiled; the limit is "
            f"{_MAX_COMPILED_BYTES >> 20} MiB: make it simpler",
            param=field,
            code="invalid_grammar",
        )
    return grammars.as_lark(constraint)


def _confine(limits: Limits) -> None:
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
def _killed_on_hangup(caller: socket.socket) -> Iterator[None]:
    # By SIGIO, so whatever code is running.
    flags = fcntl.fcntl(caller, fcntl.F_GETFL)
    fcntl.fcntl(caller, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(caller, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(caller, 0)
    if poll.poll(0):  # it had hung up before
        os._exit(1)
    yield
    fcntl.fcntl(caller, fcntl.F_SETFL, flags)  # reading the answer is a signal, too


def _receive_message(sender: socket.socket) -> bytes:
    return _receive(sender, int.from_bytes(_receive(sender, LENGTH_BYTES), "big"))


def _receive(sender: socket.socket, count: int) -> bytes:
    received = sender.recv(count, socket.MSG_WAITALL)
    if len(received) < count:
        os._exit(0)
    return received


def _memory_bytes() -> tuple[int, int]:
    with open("/proc/self/statm") as statm:
        virtual, resident, *_ = statm.read().split()
    return int(virtual) * resource.getpagesize(), int(resident) * resource.getpagesize()
