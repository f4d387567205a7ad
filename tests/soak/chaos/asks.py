"""What clients ask: requests of many kinds, drawn from a seed.

Pure; owns no connection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CONTEXT", "KINDS", "LONG_ANSWER", "Ask", "asks"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT, TURNS = 4096, 3
LONG_ANSWER = 350
"""Tokens, in the mean."""
_WORDS = [
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
]
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
    """Given the fields of `after`, and the text of its answer."""


_USAGE = {"include_usage": True}
_PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "min_tokens": 20}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
_LETTER = {"type": "function", "function": {"name": "letter"}}
_TOP = {"logprobs": True, "top_logprobs": 2, "ignore_eos": True}
_FEW, _SOME = (3, 20), (3, 30)

KINDS: dict[str, tuple[str, tuple[int, int] | None, tuple[int, int], dict[str, Any]]] = {
    "greedy": (COMPLETIONS, _SOME, (20, 150), {"temperature": 0}),
    "seeded": (COMPLETIONS, _SOME, (20, 150), {"stream_options": _USAGE}),
    "whole": (COMPLETIONS, _SOME, (20, 100), {"stream": False}),
    "whole chat": (CHAT, _SOME, (40, 100), {**_PENALTIES, "stream": False}),
    "long prompt": (COMPLETIONS, None, (10, 60), {}),
    "long answer": (
        COMPLETIONS,
        (1, 1),
        (200, 2 * LONG_ANSWER - 200),
        {"repetition_penalty": 1.05},
    ),
    "several": (COMPLETIONS, _SOME, (20, 80), {"n": 3}),
    "logprobs": (COMPLETIONS, _SOME, (20, 60), {"logprobs": 3}),
    "chat logprobs": (CHAT, _SOME, (20, 60), _TOP),
    "schema": (CHAT, _FEW, (250, 250), {"response_format": _FORMAT}),
    "tools": (CHAT, _FEW, (250, 250), {"tools": _TOOLS, "tool_choice": "required"}),
    "named tool": (CHAT, _FEW, (250, 250), {"tools": _TOOLS, "tool_choice": _LETTER}),
    "stop": (COMPLETIONS, _FEW, (120, 120), {}),
    "conversation": (CHAT, _FEW, (20, 60), {}),
}
"""Path, words of the prompt (None: as many as there may be), tokens of the answer, fields."""


def asks(seed: int, per_kind: int, longest: int) -> list[Ask]:
    """Draw `per_kind` of each kind; each step of a conversation, and of a stop string, is one.

    Prompts have up to about `longest` tokens of one byte each.
    """
    rng = random.Random(seed)
    made: list[Ask] = []
    for _ in range(per_kind):
        for kind, (path, words, tokens, more) in KINDS.items():
            said = _words(rng, *(words or (longest // 20, longest // 6)))
            chat = path == CHAT
            fields = {
                **({"messages": [{"role": "user", "content": said}]} if chat else {"prompt": said}),
                "ignore_eos": not chat,
                "max_tokens": rng.randint(*tokens),
                "return_token_ids": True,
                "seed": rng.randrange(1 << 30),
                "stream": True,
                "temperature": rng.choice([0.7, 1.0]),
                "top_p": rng.choice([0.9, 1.0]),
                **more,
            }
            made.append(Ask(len(made), kind, path, fields))
            for then in _after(rng, kind):
                made.append(Ask(len(made), kind, path, fields, made[-1].number, then))
    return made


def _words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(least, most)))


def _after(
    rng: random.Random, kind: str
) -> Iterator[Callable[[Mapping[str, Any], str], dict[str, Any]]]:
    if kind == "stop":
        share, size = rng.uniform(0.3, 0.9), rng.choice([2, 3, 5])

        def stopped(before: Mapping[str, Any], text: str) -> dict[str, Any]:
            at = int(share * len(text))
            return {**before, "stop": [text[at : at + size] or "?", "never said"]}

        yield stopped
    for _ in range(TURNS - 1 if kind == "conversation" else 0):
        said = _words(rng, 2, 10)

        def next_turn(before: Mapping[str, Any], text: str, said: str = said) -> dict[str, Any]:
            turn = [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
            return {**before, "messages": [*before["messages"], *turn]}

        yield next_turn
