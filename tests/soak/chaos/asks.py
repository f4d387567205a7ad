"""What clients ask: requests of many kinds, drawn from a seed.

Pure; owns no connection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "Ask", "asks"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TURNS = 3
_WORDS = (
    "tide",
    "map",
    "bee",
    "zero",
    "ice",
    "jazz",
    "paper",
    "lava",
    "violin",
    "sand",
    "clock",
    "moon",
    "owl",
    "rain",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z ]{20,60}$"},
        "size": {"enum": ["small", "large", 3]},
        "in": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    },
    "required": ["name", "size", "in"],
    "additionalProperties": False,
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "letter",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "pattern": "^[a-z ]{40,90}$"},
                    "days": {"type": "integer"},
                },
                "required": ["text", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `fields` lacks the model and what is drawn each time that it is asked."""

    number: int
    kind: str
    path: str
    fields: dict[str, Any]
    after: int | None = None
    """The ask on whose answer `then` builds the fields."""
    then: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None
    """Given this ask's fields, and the text of the answer to `after`."""


def asks(seed: int, per_kind: int, longest: int) -> list[Ask]:
    """`per_kind` of each kind; of a conversation, and of a stop string, each step is one.

    Prompts have up to about `longest` tokens of one byte each.
    """
    rng = random.Random(seed)
    made: list[Ask] = []
    for _ in range(per_kind):
        for kind, make in KINDS.items():
            for path, fields, then in make(rng, longest):
                after = made[-1].number if then is not None else None
                made.append(Ask(len(made), kind, path, fields, after, then))
    return made


_Then = Callable[[Mapping[str, Any], str], dict[str, Any]]
_Step = tuple[str, dict[str, Any], _Then | None]


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def _completion(rng: random.Random, words: int, tokens: int, **more: Any) -> list[_Step]:
    every = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return [(COMPLETIONS, {"prompt": _words(rng, words), **every, **more}, None)]


def _chat(rng: random.Random, words: int, tokens: int, **more: Any) -> list[_Step]:
    said = [{"role": "user", "content": _words(rng, words)}]
    every = {"max_tokens": tokens, "stream": True, "return_token_ids": True}
    return [(CHAT, {"messages": said, **every, **more}, None)]


def _sampled(
    rng: random.Random,
    make: Callable[..., list[_Step]],
    words: int,
    tokens: tuple[int, int],
    **more: Any,
) -> list[_Step]:
    drawn = {
        "seed": rng.randrange(1 << 30),
        "temperature": rng.choice([0.7, 1.0]),
        "top_p": rng.choice([0.9, 1.0]),
    }
    return make(rng, words, rng.randint(*tokens), **drawn, **more)


def _stop(rng: random.Random) -> list[_Step]:
    ((path, fields, _),) = _sampled(rng, _completion, _prompt(rng, 20), (120, 120))
    share, size = rng.uniform(0.3, 0.9), rng.choice([2, 3, 5])

    def stopped(fields: Mapping[str, Any], text: str) -> dict[str, Any]:
        at = int(share * len(text))
        return {**fields, "stop": [text[at : at + size] or "?", "never said"]}

    return [(path, fields, None), (path, fields, stopped)]


def _conversation(rng: random.Random) -> list[_Step]:
    ((path, fields, _),) = _sampled(rng, _chat, _prompt(rng, 20), (20, 60))
    steps: list[_Step] = [(path, fields, None)]
    for _ in range(TURNS - 1):
        said = _words(rng, rng.randint(2, 10))

        def next_turn(before: Mapping[str, Any], text: str, said: str = said) -> dict[str, Any]:
            turn = [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
            return {**before, "messages": [*before["messages"], *turn]}

        steps.append((path, fields, next_turn))
    return steps


def _prompt(rng: random.Random, most: int = 30) -> int:
    return rng.randint(3, most)


def _random_tools(rng: random.Random) -> dict[str, Any]:
    choice = rng.choice(["required", {"type": "function", "function": {"name": "letter"}}])
    return {"tools": _TOOLS, "tool_choice": choice}


_USAGE = {"stream_options": {"include_usage": True}}
_PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "min_tokens": 20}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
_TOP = {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}

KINDS: dict[str, Callable[[random.Random, int], list[_Step]]] = {
    "greedy": lambda rng, _: _completion(rng, _prompt(rng), rng.randint(20, 150), temperature=0),
    "seeded": lambda rng, _: _sampled(rng, _completion, _prompt(rng), (20, 150), **_USAGE),
    "whole": lambda rng, _: _sampled(rng, _completion, _prompt(rng), (20, 100), stream=False),
    "whole chat": lambda rng, _: _sampled(
        rng, _chat, _prompt(rng), (40, 100), **_PENALTIES, stream=False
    ),
    "long prompt": lambda rng, longest: _sampled(
        rng, _completion, rng.randint(longest // 20, longest // 6), (10, 60)
    ),
    "long answer": lambda rng, _: _sampled(
        rng, _completion, 1, (200, 500), repetition_penalty=1.05
    ),
    "several": lambda rng, _: _sampled(
        rng, _completion, _prompt(rng), (20, 80), n=rng.choice([2, 3])
    ),
    "logprobs": lambda rng, _: _sampled(rng, _completion, _prompt(rng), (20, 60), logprobs=3),
    "chat logprobs": lambda rng, _: _sampled(rng, _chat, _prompt(rng), (20, 60), **_TOP),
    "schema": lambda rng, _: _sampled(
        rng, _chat, _prompt(rng, 20), (250, 250), response_format=_FORMAT
    ),
    "tools": lambda rng, _: _sampled(
        rng, _chat, _prompt(rng, 20), (250, 250), **_random_tools(rng)
    ),
    "stop": lambda rng, _: _stop(rng),
    "conversation": lambda rng, _: _conversation(rng),
}
