"""Reasoning apart from the answer: `<think>` blocks and harmony channels. Pure.

Many templates open reasoning in the prompt. Without an end all is reasoning. White space next to
markers belongs to neither part.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from kvrelay.openai_api.message_parts import (
    Content,
    Part,
    Reasoning,
    StateParser,
    any_of,
    beginning_at_end,
    merged,
)

__all__ = ["HarmonySplit", "HARMONY_MARKERS", "Opening", "ReasoningMarks", "ReasoningSplit"]


class Opening(enum.Enum):
    """A beginning of an answer, as far as its prompt shows."""

    INSIDE = enum.auto()
    """The prompt has opened reasoning."""
    BEHIND = enum.auto()
    """The prompt has closed reasoning, which switches it off."""
    FREE = enum.auto()
    """The model may open reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """A set of markers around reasoning, those that the model writes first."""

    openers: tuple[str, ...] = ("<think>",)
    closers: tuple[str, ...] = ("</think>",)
    ends: tuple[str, ...] = ()
    """Markers that end it and are content."""
    assumed: bool = False
    """The answer begins with reasoning."""

    def opening(self, prompt_end: str) -> Opening:
        end = prompt_end.rstrip()
        if end.endswith(self.closers):
            return Opening.BEHIND
        return Opening.INSIDE if self.assumed or end.endswith(self.openers) else Opening.FREE


class ReasoningSplit(StateParser):
    """A splitter of text into Reasoning and Content."""

    def __init__(self, marks: ReasoningMarks, begins: Opening) -> None:
        self._openers, self._closers = marks.openers, marks.closers
        self._ends = (*marks.closers, *marks.ends)
        self._inside = begins is Opening.INSIDE
        super().__init__(self._content if begins is Opening.BEHIND else self._start)

    def finish(self) -> list[Part]:
        """Return the rest."""
        if self._state == self._start:
            self._state = self._thinking if self._inside else self._content
        parts = self.push("")
        rest, self._buffer = self._buffer.rstrip(), ""
        # What the states leave: perhaps the beginning of a marker, with white space before it.
        return merged([*parts, Reasoning(rest)]) if rest else parts

    def _start(self) -> bool:
        text = self._buffer.lstrip()
        opener = next((each for each in self._openers if text.startswith(each)), None)
        if opener is not None:
            self._buffer = text[len(opener) :]
            self._state = self._begin_thinking
        elif any(each.startswith(text) for each in self._openers):
            return False
        else:
            self._state = self._begin_thinking if self._inside else self._content
        return True

    def _begin_thinking(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._thinking
        return bool(self._buffer)

    def _thinking(self) -> bool:
        found = any_of(self._ends).search(self._buffer)
        if found is not None:
            thought = self._buffer[: found.start()].rstrip()
            self._buffer = self._buffer[
                found.end() if found[0] in self._closers else found.start() :
            ]
            self._state = self._begin_content
        else:
            cut = len(self._buffer) - beginning_at_end(self._buffer, self._ends)
            cut = len(self._buffer[:cut].rstrip())
            thought, self._buffer = self._buffer[:cut], self._buffer[cut:]
        if thought:
            self._parts.append(Reasoning(thought))
        return found is not None

    def _begin_content(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._content
        return bool(self._buffer)

    def _content(self) -> bool:
        self._parts.append(Content(self._buffer))
        self._buffer = ""
        return False


HARMONY_MARKERS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADS = ("<|", "to=")


class HarmonySplit(StateParser):
    """A splitter of harmony's channels into Reasoning and Content.

    A call stays content, for the tool parser. The answer begins with the head of a message.
    """

    def __init__(self) -> None:
        super().__init__(self._start)
        self._part: type[Content] | type[Reasoning] = Content  # what the message is
        self._end = ""  # of a call, for the tool parser
        self._told: set[type[Part]] = set()

    def finish(self) -> list[Part]:
        """Return the rest. A head without a message is no content."""
        if self._buffer and self._state != self._head:
            self._parts.append(self._part(self._buffer))
        self._buffer = ""
        return self._new_parts()

    def _start(self) -> bool:
        # A constrained answer may have no head: then all of it is content.
        text = self._buffer.lstrip()
        if any(head.startswith(text) for head in _HEADS):
            self._state = self._head if text in _HEADS else self._start
            return text in _HEADS
        self._state = self._head if text.startswith(_HEADS) else self._body
        return True

    def _head(self) -> bool:
        head, found, behind = self._buffer.partition(_BODY)
        if not found:
            return False
        self._buffer = behind
        recipient = _RECIPIENT.search(head)
        if recipient is not None:
            self._parts.append(Content(f"<|channel|>commentary to={recipient[1]}<|message|>"))
        self._end = "<|call|>" if recipient is not None else ""
        self._part = Reasoning if recipient is None and "analysis" in head else Content
        if recipient is None and self._part in self._told:
            self._parts.append(self._part("\n"))
        self._told.add(self._part)
        self._state = self._body
        return True

    def _body(self) -> bool:
        found = any_of(_ENDS).search(self._buffer)
        cut = (
            len(self._buffer) - beginning_at_end(self._buffer, _ENDS)
            if found is None
            else found.start()
        )
        if cut:
            self._parts.append(self._part(self._buffer[:cut]))
        self._buffer = self._buffer[cut:]
        if found is not None:
            self._parts += [Content(self._end)] if self._end else []
            self._end = ""
            self._state = self._head
        return found is not None
