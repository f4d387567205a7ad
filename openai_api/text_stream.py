"""Token ids in, text out; holds back the uncertain, finds stop strings. Pure."""

from __future__ import annotations

import codecs

from kvrelay.openai_api.message_parts import beginning_at_end
from kvrelay.openai_api.tokenizer import Tokenizer

__all__ = ["TextStream"]


class TextStream:
    """A text as its tokens come. Parts of a character and of a stop string are held back.

    No stop string is looked for in the first `min_tokens` tokens. With `skip_special_tokens` only
    those in `rendered` have text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        rendered: frozenset[int] = frozenset(),
    ) -> None:
        self.stop_hit: str | None = None
        """The stop string that ended the text."""
        self.sent = 0
        """Characters released so far."""
        self.decoded = 0
        """Characters decoded so far, with those held back: where the next token's text begins."""
        self._bytes_of = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        if rendered:
            self._skipped -= rendered
        self._stop = stop
        self._beginnings = frozenset("".join(text[:-1] for text in stop))
        self._include_stop = include_stop
        self._unstoppable = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_id: int) -> str:
        """Return the text that may be sent."""
        if self.stop_hit is not None:
            return ""
        text = "" if token_id in self._skipped else self._utf8.decode(self._bytes_of(token_id))
        self.decoded += len(text)
        if self._stop:
            text = self._certain(text)
        self.sent += len(text)
        return text

    def finish(self) -> str:
        """Return what was held back."""
        if self.stop_hit is not None:
            return ""
        rest = self._utf8.decode(b"", final=True)
        self.decoded += len(rest)
        rest, self._held = self._held + rest, ""
        self.sent += len(rest)
        return rest

    def _certain(self, text: str) -> str:
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return text
        text = self._held + text
        found = self._first_stop(text)
        if found is not None:
            start, self.stop_hit = found
            self._held = ""
            return text[: start + len(self.stop_hit)] if self._include_stop else text[:start]
        keep = self._beginning_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        # The one that is complete first, wherever tokens are cut; of several, the longest.
        found = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _beginning_at_end(self, text: str) -> int:
        if not text or text[-1] not in self._beginnings:
            return 0
        return beginning_at_end(text, self._stop)
