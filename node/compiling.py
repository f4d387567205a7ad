"""Compilation of requests' grammars on threads beside the step loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.paged_engine.grammar import Grammars, TimedMatcher
from kvrelay.paged_engine.request import Request
from kvrelay.wire.errors import KvrelayError

if TYPE_CHECKING:  # sandbox_process.py imports this, and needs no torch
    from kvrelay.paged_engine.engine import Engine

__all__ = ["COMPILE_DEADLINE_S", "GrammarCompiler", "grammars_for"]

log = logging.getLogger("kvrelay.engine")

# The largest schemas that are accepted take about 1 s.
COMPILE_DEADLINE_S = 10.0
_THREADS = 2
# Compilers recurse. What comes here has been compiled with less (GRAMMAR in sandbox.py).
_STACK_BYTES = 16 << 20


def grammars_for(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> Grammars:
    """Return grammars over a model's ids; takes about 4 us per token."""
    known = min(tokenizer.vocab_size, vocab_size)
    tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known)
    return Grammars(tokens, special_ids=tokenizer.special_ids, eos_token_ids=eos_token_ids)


class GrammarCompiler:
    """A pool of threads that compiles constraints of requests. Methods are for one thread."""

    def __init__(self, model: str, engine: Engine, wakeup: Callable[[], None]) -> None:
        self._model, self._engine, self._wakeup = model, engine, wakeup
        self._grammars: Grammars | None = None
        self._waiting: dict[str, Request] = {}  # in the order of arrival
        self._outcomes: dict[str, str | None] = {}  # of requests that still wait for their parent
        self._queue: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Request, str | None]] = queue.SimpleQueue()
        self._loaded = threading.Event()
        self._load_error: str | None = None
        before = threading.stack_size(_STACK_BYTES)
        for number in range(_THREADS):
            threading.Thread(
                target=self._work, args=(number == 0,), name=f"compiling-{number}", daemon=True
            ).start()
        threading.stack_size(before)

    def begin(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._queue.put(request)

    @property
    def waiting(self) -> Collection[Request]:
        return self._waiting.values()

    def drop(self, request_id: str) -> Request | None:
        self._outcomes.pop(request_id, None)
        return self._waiting.pop(request_id, None)

    def ready(self, now: float) -> list[tuple[Request, str | None]]:
        """Return requests that have their guide, or an error; a fork never before its parent."""
        while not self._done.empty():
            request, error = self._done.get()
            if self._waiting.get(request.request_id) is request:
                self._outcomes[request.request_id] = error
        found: list[tuple[Request, str | None]] = []
        for name, request in list(self._waiting.items()):
            if request.fork_of in self._waiting:
                continue
            if name in self._outcomes:
                found.append((request, self._outcomes.pop(name)))
            elif now - request.arrival_s > COMPILE_DEADLINE_S:
                assert request.params.constraint is not None
                field = request.params.constraint.field
                late = f"{field} took longer than {COMPILE_DEADLINE_S:g} s to compile"
                found.append((request, late))
            else:
                continue
            del self._waiting[name]
        return found

    def _work(self, first: bool) -> None:
        if first:
            try:
                config = self._engine.model
                tokenizer = load_tokenizer(self._model)
                self._grammars = grammars_for(tokenizer, config.vocab_size, config.eos_token_ids)
            except Exception as why:
                log.exception("grammars")
                self._load_error = f"no grammar can be followed on this node: {why}"
            self._loaded.set()
        else:
            self._loaded.wait()
        while True:
            request = self._queue.get()
            self._done.put((request, self._compile(request)))
            self._wakeup()

    def _compile(self, request: Request) -> str | None:
        constraint = request.params.constraint
        if self._grammars is None or constraint is None:
            return self._load_error
        try:
            matcher = TimedMatcher(self._grammars.matcher(constraint))
            guide = self._engine.guide(request.params, matcher)
            assert guide is not None
            guide.follow(request.token_ids, request.prompt_tokens)
            request.guide = guide
            return guide.error
        except KvrelayError as why:
            return why.message
        except Exception as why:
            log.exception("request %s", request.request_id)
            return f"{constraint.field} cannot be compiled: {type(why).__name__}: {why}"
