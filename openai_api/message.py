"""What a choice's text becomes in a chat: deltas while it streams, one message when it is whole.
Pure.

The seam for whoever finds more in a text than content (tool calls, reasoning): a MessageParser of
its own per choice.
"""

from __future__ import annotations

from typing import Protocol

from kvrelay.openai_api.types import Delta, ReplyMessage

__all__ = ["MessageParser", "PlainMessage"]


class MessageParser(Protocol):
    """Takes the text of one choice in pieces. Its state is a function of the text so far, however
    that is cut.
    """

    rendered: frozenset[int]
    """Special tokens that have their text here, whatever the request says of them."""

    def push(self, text: str) -> list[Delta]:
        """What more text adds to the message; `text` is never empty."""

    def finish(self) -> list[Delta]:
        """What it adds that nothing follows. Once, behind the last `push`."""

    def message(self) -> ReplyMessage:
        """All of it, after `finish`."""

    def finish_reason(self, reason: str) -> str:
        """The choice's finish_reason, after `finish`; `reason` is why the text ended."""


class PlainMessage:
    """All text is content."""

    rendered: frozenset[int] = frozenset()

    def __init__(self, role: str) -> None:
        self._role = role
        self._text: list[str] = []

    def push(self, text: str) -> list[Delta]:
        """See MessageParser."""
        self._text.append(text)
        return [Delta(content=text)]

    def finish(self) -> list[Delta]:
        """See MessageParser."""
        return []

    def message(self) -> ReplyMessage:
        """See MessageParser."""
        return ReplyMessage(self._role, "".join(self._text))

    def finish_reason(self, reason: str) -> str:
        """See MessageParser."""
        return reason
