"""Grammars beside the step loop: ready, refused, late, dropped, and over before they began."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from node_doubles import EOS, VOCAB, write_config

from kvrelay.node import compiling
from kvrelay.node.compiling import COMPILE_DEADLINE_S, GrammarCompiler, grammars_for
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.paged_engine.guide import Guide
from kvrelay.paged_engine.request import Request
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import Constraint, SamplingParams


class StandInEngine:
    """What GrammarCompiler asks of an engine."""

    model = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=(EOS,))

    def guide(self, params, matcher):
        return Guide(params, vocab_size=VOCAB, eos_token_ids=(EOS,), matcher=matcher)


@pytest.fixture
def model(tmp_path) -> str:
    return write_config(tmp_path)


class Compiler:
    """A GrammarCompiler with its wake-ups."""

    def __init__(self, model: str) -> None:
        self.woken = threading.Semaphore(0)
        self.inner = GrammarCompiler(model, StandInEngine(), self.woken.release)

    def begin(
        self, name: str, regex: str, generated: tuple[int, ...] = (), fork_of: str | None = None
    ) -> Request:
        params = SamplingParams(
            9, seed=0, constraint=Constraint("regex", regex, field="guided_regex")
        )
        request = Request.from_submit(
            Submit(name, [5], params, generated=list(generated), fork_of=fork_of), 100.0
        )
        self.inner.begin(request)
        return request

    def ready(self, now: float = 100.0) -> list[tuple[Request, str | None]]:
        assert self.woken.acquire(timeout=60)
        return self.inner.ready(now)


def test_a_request_gets_a_guide_that_has_followed_its_tokens(model):
    compiler = Compiler(model)
    fresh = compiler.begin("fresh", "ab")
    assert compiler.ready() == [(fresh, None)]
    assert fresh.guide is not None
    assert not fresh.guide.over
    ended = compiler.begin("ended", "ab", tuple(b"ab"))
    assert compiler.ready() == [(ended, None)]
    assert ended.guide.over
    assert compiler.inner.ready(100.0) == []


def test_what_cannot_be_followed_is_told_with_its_reason(model):
    compiler = Compiler(model)
    wrong = compiler.begin("wrong", "(")
    ((request, error),) = compiler.ready()
    assert request is wrong
    assert "unclosed group" in error
    strange = compiler.begin("strange", "ab", tuple(b"x"))
    ((request, error),) = compiler.ready()
    assert request is strange
    assert "does not match" in error


def test_a_compilation_that_takes_too_long_ends_its_request_alone(model, monkeypatch):
    release, entered = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, inner) -> None:
            self._inner = inner

        def matcher(self, constraint):
            if constraint.text == "slow":
                entered.set()
                assert release.wait(60)
            return self._inner.matcher(constraint)

    monkeypatch.setattr(compiling, "grammars_for", lambda *of: Slow(grammars_for(*of)))
    compiler = Compiler(model)
    slow = compiler.begin("slow", "slow")
    assert entered.wait(60)
    quick = compiler.begin("quick", "ab")
    assert compiler.ready() == [(quick, None)]
    fork = compiler.begin("fork", "ab", fork_of="slow")
    assert compiler.ready() == [], "a fork waits for its parent"
    (first, error), second = compiler.inner.ready(100.1 + COMPILE_DEADLINE_S)
    assert first is slow
    assert "guided_regex took longer than 10 s" in error
    assert second == (fork, None)
    release.set()
    assert compiler.ready() == []


def test_a_vocabulary_may_be_larger_or_smaller_than_the_tokenizers(model):
    tokenizer = load_tokenizer(model)
    for vocab_size in (VOCAB - 20, VOCAB, VOCAB + 37):
        matcher = grammars_for(tokenizer, vocab_size, (EOS,)).matcher(Constraint("regex", "ab"))
        assert len(matcher.compute_bitmask()) == -(-vocab_size // 32) * 4
