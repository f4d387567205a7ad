"""Reasoning apart from the answer. Pure.

Many templates open reasoning in the prompt. Without an end all is reasoning. White space next to
markers belongs to neither part.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvrelay.openai_api.message_parts import Part, StateParser, any_of, beginning_at_end, merged
from kvrelay.openai_api.model_formats import ReasoningFormat

__all__ = ["Opening", "ReasoningSplit", "opening"]


class Opening(enum.Enum):
    """A beginning of an answer, as far as its prompt shows."""

    INSIDE = enum.auto()
    """The prompt has opened reasoning."""
    BEHIND = enum.auto()
    """The prompt has closed reasoning, which switches it off."""
    FREE = enum.auto()
    """The model may open reasoning."""


def opening(prompt_end: str, form: ReasoningFormat) -> Opening:
    end = prompt_end.rstrip()
    if end.endswith(form.closers):
        return Opening.BEHIND
    return Opening.INSIDE if form.assumed or end.endswith(form.openers) else Opening.FREE


class ReasoningSplit(StateParser):
    def __init__(self, form: ReasoningFormat, begins: Opening) -> None:
        self._openers, self._closers = form.openers, form.closers
        self._inside = begins is Opening.INSIDE
        super().__init__(self._content if begins is Opening.BEHIND else self._start)

    def finish(self) -> list[Part]:
        if self._state == self._start:
            self._state = self._thinking if self._inside else self._content
        parts = self.push("")
        rest, self._buffer = self._buffer.rstrip(), ""
        # What the states leave: perhaps the beginning of a marker, with white space before it.
        return merged([*parts, Part("reasoning", rest)]) if rest else parts

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        opener = next((each for each in self._openers if text.startswith(each)), None)
        if opener is not None:
            self._buffer, self._inside = text[len(opener) :], True
        elif any(each.startswith(text) for each in self._openers):
            return False
        self._state = self._before_thinking if self._inside else self._content
        return True

    def _before_thinking(self) -> bool:
        return self._skip_space_to(self._thinking)

    def _before_content(self) -> bool:
        return self._skip_space_to(self._content)

    def _skip_space_to(self, state: Callable[[], bool]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = state
        return bool(self._buffer)

    def _thinking(self) -> bool:
        found = any_of(self._closers).search(self._buffer)
        if found is not None:
            thought, self._buffer = self._buffer[: found.start()], self._buffer[found.end() :]
            thought, self._state = thought.rstrip(), self._before_content
        else:
            cut = len(self._buffer) - beginning_at_end(self._buffer, self._closers)
            cut = len(self._buffer[:cut].rstrip())
            thought, self._buffer = self._buffer[:cut], self._buffer[cut:]
        if thought:
            self._parts.append(Part("reasoning", thought))
        return found is not None

    def _content(self) -> bool:
        self._parts.append(Part("content", self._buffer))
        self._buffer = ""
        return False
