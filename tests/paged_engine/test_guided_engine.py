"""Constraints on answers of a model with random weights: whatever it draws parses, matches, and
ends.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from engines import GPU_SIZES, ON_GPU, drain, make, output, prompt
from grammar_doubles import EOS, JSON, SCHEMA, TOKENS, VOCAB, regex
from tiny_models import make_tiny

from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.grammar import Grammars, TimedMatcher
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import SpeculativeConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.outputs import Finish
from kvrelay.wire.sampling import Constraint, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guided")
    make_tiny("LlamaForCausalLM", folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder) -> Engine:
    return make(folder)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENS, special_ids=[EOS], eos_token_ids=[EOS])


def guided(
    engine: Engine,
    grammars: Grammars,
    name: str = "r",
    generated: list[int] | None = None,
    **params,
) -> Request:
    own = SamplingParams(**({"max_tokens": 200, "seed": 3} | params)).check(VOCAB)
    request = Request.from_submit(
        Submit(name, prompt(9, seed=len(name)), own, generated=generated or []), 0.0
    )
    matcher = TimedMatcher(grammars.matcher(own.constraint)) if own.constraint else None
    request.guide = engine.guide(own, matcher)
    engine.scheduler.add(request)
    return request


@pytest.fixture
def ask(engine, grammars):
    return partial(guided, engine, grammars)


def text(request: Request) -> str:
    return b"".join(TOKENS[token] for token in output(request) if token != EOS).decode()


def check_schema(value: dict) -> None:
    assert list(value) == ["näme", "state", "place", "marks"]
    assert isinstance(value["näme"], str)
    assert len(value["näme"]) <= 6
    assert value["state"] in SCHEMA["properties"]["state"]["enum"]
    assert list(value["place"]) == ["x", "y"]
    assert -9 <= value["place"]["x"] <= 99
    assert isinstance(value["place"]["y"], bool)
    assert 1 <= len(value["marks"]) <= 3
    assert all(isinstance(mark, bool) for mark in value["marks"])


LARK = 'start: word ("," word)*\nword: /[a-c]{1,3}/'
GBNF = 'root ::= "<" [0-9] [0-9]? ">"'
KINDS = [
    (JSON, lambda answer: check_schema(json.loads(answer)) is None),
    (Constraint("json", '{"enum": ["é", {"a": [1]}, "x y"]}'), lambda a: json.loads(a) in ("é", {"a": [1]}, "x y")),
    (Constraint("json", '{"const": {"a": 1}}', whitespace="[\n]{2}"), lambda a: a.replace("\n\n", "") == '{"a":1}'),
    (regex(r"\d{3}-[a-f]+/\w{2}"), lambda answer: re.fullmatch(r"[0-9]{3}-[a-f]+/\w{2}", answer)),
    (Constraint("choice", '["positive", "pos", "négatif \\"x\\""]'), lambda a: a in ("positive", "pos", 'négatif "x"')),
    (Constraint("grammar", LARK), lambda answer: re.fullmatch("[a-c]{1,3}(,[a-c]{1,3})*", answer)),
    (Constraint("grammar", GBNF), lambda answer: re.fullmatch("<[0-9][0-9]?>", answer)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "holds"), KINDS, ids=lambda value: getattr(value, "kind", "")
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_is_what_its_constraint_says(constraint, holds, temperature, engine, ask):
    # Without a bias to its end a random model goes on as long as it may.
    bias = ((EOS, 30.0), (ord('"'), 5.0), (ord("/"), 20.0))
    requests = [
        ask(
            f"r{seed}",
            constraint=constraint,
            temperature=temperature,
            seed=seed,
            logit_bias=bias,
        )
        for seed in range(4)
    ]
    drain(engine)
    for request in requests:
        assert request.finish is Finish.STOP, text(request)
        assert holds(text(request)), text(request)


def test_what_was_generated_elsewhere_is_replayed(engine, ask):
    """A decode node after a hand-over or a fail-over knows the tokens alone, and goes on as if
    nothing had happened.
    """
    bad = ((ord("a"), ord("b")), (ord("u"),))
    params = {
        "constraint": JSON,
        "bad_words": bad,
        "seed": 11,
        "logit_bias": ((ord('"'), 4.0), (EOS, 9.0)),
    }
    whole = ask("whole", **params)
    drain(engine)
    tokens = output(whole)
    assert whole.finish is Finish.STOP
    for cut in (1, 2, len(tokens) // 2, len(tokens) - 1):
        rest = ask("whole", generated=tokens[:cut], **params)
        drain(engine)
        assert output(rest) == tokens
        assert rest.finish is Finish.STOP


class OneStepAhead:
    """The CPU's runner as a GPU's: a step is planned and launched while nobody knows the tokens of
    the one before.
    """

    runs_ahead = True

    def __init__(self, runner) -> None:
        self._runner = runner

    def launch(self, chunks):
        return _Later(self._runner, chunks)


class _Later:
    def __init__(self, runner, chunks) -> None:
        self.requests = [chunk.request for chunk in chunks if chunk.samples]
        self._runner, self._chunks = runner, chunks
        self._blocks = [list(chunk.request.blocks) for chunk in chunks]

    def sample(self) -> None:
        """All earlier tokens are known now, but for those of requests that have ended meanwhile."""
        for chunk, blocks in zip(self._chunks, self._blocks, strict=True):
            if chunk.request.finish is not None:
                chunk.request.blocks = blocks
        self._done = self._runner.launch(self._chunks)
        for chunk in self._chunks:
            if chunk.request.finish is not None:
                chunk.request.blocks = []

    def wait(self):
        return self._done.wait()


def test_one_step_ahead_of_the_host_the_tokens_are_the_same(folder, grammars):
    def answers(ahead: bool) -> list[tuple[list[int], object]]:
        engine = make(folder)
        if ahead:
            engine._runner = OneStepAhead(engine._runner)
        plain = {"max_tokens": 40, "temperature": 0.8, "ignore_eos": True}
        quotes = ((ord('"'), 4.0), (EOS, 9.0))
        requests = [
            guided(engine, grammars, "a", constraint=JSON, logit_bias=quotes),
            guided(engine, grammars, "bb", **plain),
            guided(engine, grammars, "ccc", constraint=regex("ab|ac"), ignore_eos=True),
            guided(
                engine, grammars, "dddd", bad_words=((ord("a"),), (ord("b"), ord("c"))), **plain
            ),
            guided(
                engine,
                grammars,
                "eeeee",
                constraint=regex("ab"),
                bad_words=((ord("b"),),),
            ),
        ]
        drain(engine)
        return [(output(request), request.finish) for request in requests]

    ours = answers(ahead=True)
    assert ours == answers(ahead=False)
    assert [finish for _, finish in ours] == [
        Finish.STOP,
        Finish.LENGTH,
        Finish.STOP,
        Finish.LENGTH,
        Finish.STOP,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_on_a_gpu_answers_match_and_other_rows_are_what_they_are_alone(
    batch_invariant, tmp_path, grammars
):
    make_tiny("Qwen3ForCausalLM", tmp_path, **GPU_SIZES)
    engine = make(tmp_path, **ON_GPU, batch_invariant=batch_invariant)
    plain = {"max_tokens": 40, "ignore_eos": True}

    def answer(name: str, seed: int) -> Request:
        constraint = regex(f"[a-f]{{{seed},}}x")
        return guided(
            engine, grammars, name, constraint=constraint, seed=seed, logit_bias=((ord("x"), 9.0),)
        )

    alone = [guided(engine, grammars, "plain", **plain)]
    drain(engine)
    alone.append(answer("xx", 9))
    drain(engine)
    crowd = [
        guided(engine, grammars, "plain", **plain),
        answer("xx", 9),
        *(answer(f"r{n}", n) for n in range(1, 5)),
    ]
    single = guided(
        engine, grammars, "only", constraint=Constraint("choice", '["yes"]'), top_k=3, top_p=0.9
    )
    ending = guided(engine, grammars, "none", constraint=regex("ab"), bad_words=((ord("b"),),))
    drain(engine)
    for request, least in zip(crowd[1:], (9, 1, 2, 3, 4), strict=True):
        assert re.fullmatch(f"[a-f]{{{least},}}x", text(request))
        assert request.finish is Finish.STOP
    assert (text(single), text(ending), ending.finish) == ("yes", "a", Finish.STOP)
    assert len(output(crowd[0])) == 40
    if batch_invariant:
        assert [output(request) for request in crowd[:2]] == [output(request) for request in alone]


def test_beside_rows_of_proposals_guided_ones_have_one_row_each(folder, grammars):
    def answers(**options) -> list[list[int]]:
        engine = make(folder, **options)
        free = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        requests = [
            guided(engine, grammars, "free", **free),
            guided(
                engine, grammars, "a", constraint=JSON, logit_bias=((ord('"'), 4.0),), max_tokens=60
            ),
            guided(engine, grammars, "bb", allowed_token_ids=(70, 71), **free),
        ]
        drain(engine)
        assert bool(engine.scheduler.speculation.draft_tokens) == bool(options)
        return [output(request) for request in requests]

    assert answers(speculative_config=SpeculativeConfig(3)) == answers()


def test_the_end_comes_where_the_grammar_allows_it_and_not_before(engine, ask):
    """The model wants nothing but to end."""
    wants = {"logit_bias": ((EOS, 100.0),), "constraint": regex("[ab]{3,}")}
    request = ask("now", **wants)
    late = ask("late", **wants, min_tokens=6)
    never = ask("never", **wants, ignore_eos=True, max_tokens=8)
    forced = ask(
        "forced",
        constraint=regex("ab"),
        ignore_eos=True,
        min_tokens=9,
    )
    drain(engine)
    assert [len(text(r)) for r in (request, late, never, forced)] == [3, 6, 8, 2]
    assert [r.finish for r in (request, late, never, forced)] == [
        Finish.STOP, Finish.STOP, Finish.LENGTH, Finish.STOP,
    ]  # fmt: skip
    assert text(forced) == "ab"


def test_an_answer_ends_when_no_token_is_left(engine, ask):
    """The grammar wants a b, which is forbidden: neither a b nor anything else is said."""
    nothing = ask(constraint=regex("ab"), bad_words=((ord("b"),),), logprobs=1)
    drain(engine)
    assert (text(nothing), nothing.finish) == ("a", Finish.STOP)
    assert len(nothing.new_logprobs) == 1
    only_end = ask(allowed_token_ids=(EOS,), min_tokens=3)
    drain(engine)
    assert (output(only_end), only_end.finish) == ([], Finish.STOP)


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(engine, ask):
    other = ask("other", max_tokens=5, ignore_eos=True)
    wrong = ask("wrong", generated=[ord("z")], constraint=regex("ab"))
    drain(engine)
    assert (other.finish, len(output(other))) == (Finish.LENGTH, 5)
    assert wrong.finish is Finish.ERROR
    assert "does not match" in wrong.guide.error
    assert output(wrong) == [ord("z")]


def test_a_grammar_that_becomes_too_much_for_its_library_ends_its_answer(engine, ask):
    class GivesUp:
        """As llguidance does at its limits: while a mask is computed, here the third."""

        def __init__(self, inner) -> None:
            self._inner, self._masks = inner, 0

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def unsafe_compute_mask_ptr(self, *where) -> None:
            self._masks += 1
            self._inner.unsafe_compute_mask_ptr(*where)

        def is_error(self) -> bool:
            return self._masks == 3

        def get_error(self) -> str:
            return "too many items\nin this state"

    request = ask(constraint=regex("[a-z]{30}"), logprobs=0)
    request.guide.matcher = GivesUp(request.guide.matcher)
    drain(engine)
    assert request.finish is Finish.ERROR
    assert re.fullmatch("[a-z]{2}", text(request)), "no token that was drawn without a mask"
    assert len(request.new_logprobs) == 2
    assert request.guide.error.endswith("cannot be followed any further: too many items")


def test_only_allowed_tokens_come(engine, ask):
    allowed = (5, 31, 32, 63, 64, 255)
    request = ask(allowed_token_ids=allowed, max_tokens=40, temperature=2.0)
    both = ask(
        "both",
        allowed_token_ids=(*b"xyz", EOS),
        constraint=regex("[w-y]{5}z"),
    )
    drain(engine)
    assert set(output(request)) == set(allowed)
    assert re.fullmatch("[xy]{5}z", text(both))


def test_bad_words_end_nowhere(engine, ask):
    """Of four tokens that it may say, never b after a, never c after a and c, and never d."""
    bad = ((ord("a"), ord("b")), (ord("a"), ord("c"), ord("c")), (ord("d"),))
    params = {"allowed_token_ids": tuple(b"abcd"), "max_tokens": 150, "temperature": 2.0}
    request = ask(bad_words=bad, **params)
    free = ask("free", **params)
    drain(engine)
    assert all(word in text(free) for word in ("ab", "acc", "d"))
    assert not any(word in text(request) for word in ("ab", "acc", "d"))
    assert all(word in text(request) for word in ("aa", "ac", "ba", "ca", "cc"))
