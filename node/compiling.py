"""Compilation of requests' grammars on threads beside the step loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
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

# The largest accepted schemas take about 1 s.
COMPILE_DEADLINE_S = 10.0
_THREADS = 2
# Compilers recurse; all was compiled with less before (GRAMMAR in sandbox.py).
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
        self._waiting: dict[str, tuple[Request, Future[str | None]]] = {}
        threading.stack_size(_STACK_BYTES)  # of later threads
        self._threads = ThreadPoolExecutor(_THREADS, "compiling")
        self._grammars = self._threads.submit(self._load)

    def begin(self, request: Request) -> None:
        compiled = self._threads.submit(self._compile, request)
        self._waiting[request.request_id] = request, compiled
        compiled.add_done_callback(lambda _: self._wakeup())

    @property
    def waiting(self) -> list[Request]:
        return [request for request, _ in self._waiting.values()]

    def drop(self, request_id: str) -> Request | None:
        request, _ = self._waiting.pop(request_id, (None, None))
        return request

    def ready(self, now: float) -> list[tuple[Request, str | None]]:
        """Return requests that have their guide, or an error; a fork never before its parent."""
        found: list[tuple[Request, str | None]] = []
        for name, (request, compiled) in list(self._waiting.items()):
            late = now - request.arrival_s > COMPILE_DEADLINE_S
            if request.fork_of in self._waiting or not (compiled.done() or late):
                continue
            if compiled.done():
                error = compiled.result()
            else:
                assert request.params.constraint is not None
                field = request.params.constraint.field
                error = f"{field} took longer than {COMPILE_DEADLINE_S:g} s to compile"
            found.append((request, error))
            del self._waiting[name]
        return found

    def _load(self) -> Grammars:
        config = self._engine.model
        try:
            tokenizer = load_tokenizer(self._model)
            return grammars_for(tokenizer, config.vocab_size, config.eos_token_ids)
        except Exception:
            log.exception("no grammar can be followed on this node")
            raise

    def _compile(self, request: Request) -> str | None:
        constraint = request.params.constraint
        assert constraint is not None
        try:
            grammars = self._grammars.result()
        except Exception as why:  # noqa: BLE001 - logged once, when it happened
            return f"no grammar can be followed on this node: {why}"
        try:
            matcher = TimedMatcher(grammars.matcher(constraint))
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
