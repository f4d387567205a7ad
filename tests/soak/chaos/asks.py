"""What clients ask: requests of many kinds, drawn from a seed. Pure; owns no connection.

An ask may build on the undisturbed answer to an earlier one: the next turn of a conversation, or a
stop string that is known to come.
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
    "tide", "map", "bee", "zero", "ice", "jazz", "paper", "lava", "violin", "sand", "clock", "moon", "owl", "rain",
)  # fmt: skip
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
    """`per_kind` of each kind; of a conversation, and of a stop string, each step is one. Prompts
    have up to about `longest` tokens of one byte each. Each stands behind the one that it builds
    on.
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


def _sampled(rng: random.Random) -> dict[str, Any]:
    return {
        "seed": rng.randrange(1 << 30),
        "temperature": rng.choice([0.7, 1.0]),
        "top_p": rng.choice([0.9, 1.0]),
    }


def _completion(rng: random.Random, words: int, tokens: int, **more: Any) -> list[_Step]:
    every = {"max_tokens": tokens, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return [(COMPLETIONS, {"prompt": _words(rng, words), **every, **more}, None)]


def _chat(rng: random.Random, words: int, tokens: int, **more: Any) -> list[_Step]:
    said = [{"role": "user", "content": _words(rng, words)}]
    every = {"max_tokens": tokens, "stream": True, "return_token_ids": True}
    return [(CHAT, {"messages": said, **every, **more}, None)]


def _greedy(rng: random.Random, longest: int) -> list[_Step]:
    return _completion(rng, rng.randint(3, 30), rng.randint(20, 150), temperature=0)


def _seeded(rng: random.Random, longest: int) -> list[_Step]:
    usage = {"stream_options": {"include_usage": True}}
    return _completion(rng, rng.randint(3, 30), rng.randint(20, 150), **_sampled(rng), **usage)


def _whole(rng: random.Random, longest: int) -> list[_Step]:
    return _completion(rng, rng.randint(3, 30), rng.randint(20, 100), **_sampled(rng), stream=False)


def _whole_chat(rng: random.Random, longest: int) -> list[_Step]:
    penalties = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "min_tokens": 20}
    return _chat(
        rng, rng.randint(3, 30), rng.randint(40, 100), **_sampled(rng), **penalties, stream=False
    )


def _long_prompt(rng: random.Random, longest: int) -> list[_Step]:
    return _completion(
        rng, rng.randint(longest // 20, longest // 6), rng.randint(10, 60), **_sampled(rng)
    )


def _long_answer(rng: random.Random, longest: int) -> list[_Step]:
    return _completion(rng, 1, rng.randint(200, 500), **_sampled(rng), repetition_penalty=1.05)


def _several(rng: random.Random, longest: int) -> list[_Step]:
    return _completion(
        rng, rng.randint(3, 30), rng.randint(20, 80), **_sampled(rng), n=rng.choice([2, 3])
    )


def _logprobs(rng: random.Random, longest: int) -> list[_Step]:
    return _completion(rng, rng.randint(3, 30), rng.randint(20, 60), **_sampled(rng), logprobs=3)


def _chat_logprobs(rng: random.Random, longest: int) -> list[_Step]:
    more = {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    return _chat(rng, rng.randint(3, 30), rng.randint(20, 60), **_sampled(rng), **more)


def _schema(rng: random.Random, longest: int) -> list[_Step]:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    return _chat(rng, rng.randint(3, 20), 250, **_sampled(rng), response_format=wanted)


def _tools(rng: random.Random, longest: int) -> list[_Step]:
    choice: Any = rng.choice(["required", {"type": "function", "function": {"name": "letter"}}])
    return _chat(rng, rng.randint(3, 20), 250, **_sampled(rng), tools=_TOOLS, tool_choice=choice)


def _stop(rng: random.Random, longest: int) -> list[_Step]:
    ((path, fields, _),) = _completion(rng, rng.randint(3, 20), 120, **_sampled(rng))
    share, size = rng.uniform(0.3, 0.9), rng.choice([2, 3, 5])

    def stopped(fields: Mapping[str, Any], text: str) -> dict[str, Any]:
        at = int(share * len(text))
        return {**fields, "stop": [text[at : at + size] or "?", "never said"]}

    return [(path, fields, None), (path, fields, stopped)]


def _conversation(rng: random.Random, longest: int) -> list[_Step]:
    ((path, fields, _),) = _chat(rng, rng.randint(3, 20), rng.randint(20, 60), **_sampled(rng))
    steps: list[_Step] = [(path, fields, None)]
    for _ in range(TURNS - 1):
        said = _words(rng, rng.randint(2, 10))

        def next_turn(before: Mapping[str, Any], text: str, said: str = said) -> dict[str, Any]:
            turn = [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
            return {**before, "messages": [*before["messages"], *turn]}

        steps.append((path, fields, next_turn))
    return steps


KINDS: dict[str, Callable[[random.Random, int], list[_Step]]] = {
    "greedy": _greedy,
    "seeded": _seeded,
    "whole": _whole,
    "whole chat": _whole_chat,
    "long prompt": _long_prompt,
    "long answer": _long_answer,
    "several": _several,
    "logprobs": _logprobs,
    "chat logprobs": _chat_logprobs,
    "schema": _schema,
    "tools": _tools,
    "stop": _stop,
    "conversation": _conversation,
}
