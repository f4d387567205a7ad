"""Harmony, gpt-oss's format: messages in channels. Reasoning, content and calls apart. Pure.

The prompt ends with `<|start|>assistant`; the answer goes on with the head of a message.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kvrelay.openai_api.markers import any_of, beginning_at_end
from kvrelay.openai_api.message_parts import Content, Part, Reasoning, joined

__all__ = ["MARKERS", "HarmonySplit"]

MARKERS = (
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


class HarmonySplit:
    """Takes an answer's text in pieces that may be cut anywhere; gives Reasoning and Content.

    A call stays in the content as a message of its own, for the tool parser.
    """

    def __init__(self) -> None:
        self._state: Callable[[], bool] = self._start
        self._buffer = ""
        self._part: type[Content] | type[Reasoning] = Content  # what the message is
        self._end = ""  # of a call, for the tool parser
        self._told: set[type[Part]] = set()
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """What has become certain with this text."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = joined(self._parts), []
        return parts

    def finish(self) -> list[Part]:
        """The rest, now that nothing follows. A head without a message is no content."""
        if self._buffer and self._state != self._head:
            self._parts.append(self._part(self._buffer))
        self._buffer = ""
        parts, self._parts = joined(self._parts), []
        return parts

    def _start(self) -> bool:
        """Where a head is due. A constrained answer may have none: then all of it is content."""
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
