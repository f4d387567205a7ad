"""Prompts as token ids or as text, made of names: equal names give equal tokens. Pure.

What a server makes of a text is not known here; `words_per_token` and `overhead` say what it made
of others (load/endpoint.py asks it). Token ids are exact, and the same for every model with such a
vocabulary.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgspec

from kvrelay.load.sessions import Turn

__all__ = ["FIRST_TOKEN", "Prompts", "Spelling", "body"]

FIRST_TOKEN = 300
"""Special tokens and bytes stand before it in nearly all vocabularies; none of them may end a
request.
"""

# Short and usual: one token each, with the space before it, in most vocabularies.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea kid body back
    parent face others level office door health person art war history party result change morning reason research
    girl guy moment air teacher force education foot boy age policy process music market sense nation plan college
    interest death experience effect use class control care field development role effort rate heart drug show leader
    light voice wife police mind price report decision son view relationship town road arm difference value building
    action season society tax director position player record paper space ground form event official matter center
    couple site project activity star table need court oil situation cost industry figure street image phone data
    picture practice piece land product doctor wall patient worker news test movie north love support technology step
    baby computer type attention film tree source organization hair look century evidence window culture chance
    brother energy period course summer plant term opinion rest letter condition choice rule south floor
    campaign material population call east note west church bank fire truth board risk song hope store
""".split()  # noqa: SIM905 - the rule would have one line of 3,000 characters


class Spelling(msgspec.Struct, frozen=True):
    """How a text's words become tokens: `overhead` tokens more for each whole prompt, of a chat
    template for one.
    """

    words_per_token: float = 1.0
    overhead: int = 0


class Prompts:
    """Of one run: another seed gives other tokens to every name, so that no cache knows them."""

    def __init__(self, seed: str, vocab_size: int, spelling: Spelling) -> None:
        self._seed, self._spelling = seed, spelling
        self._span = vocab_size - FIRST_TOKEN

    def ids(self, turn: Turn) -> list[int]:
        """Token ids between FIRST_TOKEN and the end of the vocabulary."""
        first, span = FIRST_TOKEN, self._span
        found: list[int] = []
        for name, tokens in turn.pieces:
            drawn = array("I", random.Random(f"{self._seed} {name}").randbytes(4 * tokens))
            found += [first + each % span for each in drawn]
        return found

    def text(self, turn: Turn) -> str:
        """Words, about as many as make so many tokens; what a template adds is taken from the last
        piece.
        """
        if turn.text:
            return turn.text
        parts = []
        for at, (name, tokens) in enumerate(turn.pieces):
            if at == len(turn.pieces) - 1:
                tokens = max(1, tokens - self._spelling.overhead)
            count = max(1, round(tokens * self._spelling.words_per_token))
            drawn = random.Random(f"{self._seed} {name}").randbytes(count)
            parts += [_WORDS[each % len(_WORDS)] for each in drawn]
        return " ".join(parts)

    def words(self, count: int) -> str:
        """So many words that no prompt begins with, to see what a server makes of them."""
        rng = random.Random(f"{self._seed} words {count}")
        return " ".join(rng.choices(_WORDS, k=count))


def body(
    prompt: list[int] | str | list[dict[str, Any]], model: str, output: int, asks: dict[str, Any]
) -> bytes:
    """The request as JSON: a prompt of a completion, or the messages of a chat; `asks` are its
    other fields.
    """
    what = (
        "messages"
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)
        else "prompt"
    )
    return msgspec.json.encode({"model": model, what: prompt, "max_tokens": output, **asks})
