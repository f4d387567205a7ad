"""The text of a chat's choice as its message: reasoning, content and tool calls. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET

from kvrelay.openai_api.message_parts import (
    Arguments,
    CallBegun,
    CallIds,
    Content,
    Part,
    Reasoning,
    joined,
)
from kvrelay.openai_api.model_formats import TOOL_FORMATS, ReasoningFormat, ToolFormat
from kvrelay.openai_api.reasoning import Opening
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tool_choice import Choice, ToolUse, asked_tools
from kvrelay.openai_api.tool_parsers import NamedParser, TextParser
from kvrelay.openai_api.types import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    Delta,
    FunctionDelta,
    ReplyMessage,
    ToolCall,
    ToolCallDelta,
)
from kvrelay.wire.errors import RequestError
from kvrelay.wire.sampling import Constraint

__all__ = ["MessageForm", "MessageParser", "MessageStream", "PlainMessage", "message_form"]


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


_ROLE = "assistant"
_PROMPT_END_TOKENS = 16  # hold the markers of reasoning however they are cut


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How the text of the answers to a request becomes messages."""

    tools: ToolUse
    tool_format: ToolFormat | None = None
    """The node's, for tool_choice auto; its model's ids of calls are made for the other choices
    too.
    """
    calls: int = 0
    """In the chat so far, for models that count them in the ids."""
    reasoning: ReasoningFormat | None = None
    """None: none is looked for."""
    opening: Opening = Opening.FREE
    """How the answer begins."""
    include_reasoning: bool = True
    hidden: dict[int, str] = field(default_factory=dict)
    """Markers that are special tokens, by id: they are rendered for the parsers, and the client
    never sees them.
    """

    @property
    def plain(self) -> bool:
        """The text is the content."""
        return self.tools.choice is Choice.NONE and self.reasoning is None

    def guided(self, constraint: Constraint | None) -> Constraint | None:
        """A constraint of the content, as one of the whole text: reasoning is free."""
        if constraint is None or self.reasoning is None or self.opening is Opening.BEHIND:
            return constraint
        marks = self.reasoning.marks
        opener = marks.openers[0] if self.opening is Opening.FREE else ""
        return msgspec.structs.replace(constraint, behind=marks.closers[0], opener=opener)

    def parser(self, response_id: str, choice: int) -> MessageParser:
        """For one choice."""
        if self.plain:
            return PlainMessage(_ROLE)
        form = (self.tool_format or TOOL_FORMATS["json"]).ids
        ids = CallIds(response_id, choice, form, self.calls)
        hidden = tuple(self.hidden.values())
        content: TextParser
        match self.tools.choice:
            case Choice.AUTO:
                assert self.tool_format is not None, "message_form has checked it"
                content = self.tool_format.reader(ids, hidden, self.tools.tools)
            case Choice.REQUIRED:
                content = TOOL_FORMATS["json"].reader(ids, hidden, self.tools.tools)
            case Choice.NAMED:
                content = NamedParser(ids, self.tools.name)
            case Choice.NONE:
                content = TextParser(ids, hidden)
        return MessageStream(self, content, TextParser(ids, hidden))


def message_form(
    request: ChatRequest | CompletionRequest,
    tokenizer: Tokenizer,
    prompt: list[int],
    *,
    tool_format: ToolFormat | None,
    reasoning: ReasoningFormat | None,
) -> MessageForm:
    """The form of the answers to a request on a node with these formats.

    Raises RequestError if it is left to the model whether to call a tool, and no parser would
    notice.
    """
    if isinstance(request, CompletionRequest):
        return MessageForm(ToolUse())
    tools = asked_tools(request)
    if tools.choice is Choice.AUTO and tool_format is None:
        raise RequestError(
            "tool_choice auto (the default with tools) is switched off here: the nodes were "
            "started with "
            "--tool-call-parser none; start them without, or send tool_choice required or the "
            "name of a tool",
            param="tool_choice",
        )
    begins = Opening.FREE
    markers: tuple[str, ...] = ()
    if reasoning is not None:
        begins = reasoning.marks.opening(
            tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        )
        markers = reasoning.markers
    if tools.choice is Choice.AUTO and tool_format is not None:
        markers += tool_format.marks.markers
    hidden: dict[int, str] = {}
    if request.skip_special_tokens is not False:
        hidden = {
            token: marker
            for marker in markers
            if (token := tokenizer.special_id(marker)) is not None
        }
    calls = sum(len(message.tool_calls or ()) for message in request.messages)
    return MessageForm(
        tools, tool_format, calls, reasoning, begins, request.include_reasoning is not False, hidden
    )


@dataclass(slots=True)
class _Call:
    """A call so far."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class MessageStream:
    """One choice, as a MessageParser. `push` pieces of text, cut anywhere, and `finish` once."""

    def __init__(self, form: MessageForm, content: TextParser, thoughts: TextParser) -> None:
        """`content` and `thoughts` parse what their names say; in thoughts are markers to be taken
        out at most.
        """
        self.rendered = frozenset(form.hidden)
        """Special tokens that must have their text here."""
        self._form = form
        self._parser = content
        self._split = None if form.reasoning is None else form.reasoning.split(form.opening)
        self._thoughts = thoughts
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    def push(self, text: str) -> list[Delta]:
        """What more text adds to the message."""
        if self._split is None:
            return self._told(self._parser.push(text))
        return self._told(self._divided(self._split.push(text)))

    def finish(self) -> list[Delta]:
        """What it adds that nothing follows."""
        parts = [] if self._split is None else self._divided(self._split.finish())
        return self._told([*parts, *self._end_thoughts(), *self._parser.finish()])

    def message(self) -> ReplyMessage:
        """All of it, after `finish`."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [
            ToolCall(call.id, CalledFunction(call.name, "".join(call.arguments)))
            for call in self._calls
        ]
        shown = content if content or not (reasoning or calls) else None
        return ReplyMessage(_ROLE, shown, reasoning or None, reasoning or UNSET, calls or UNSET)

    def finish_reason(self, reason: str) -> str:
        """The choice's, after `finish`. A call that the request named ends with `stop` as any text
        does.
        """
        called = bool(self._calls) and self._form.tools.choice is not Choice.NAMED
        return "tool_calls" if called and reason == "stop" else reason

    def _divided(self, split: list[Part]) -> list[Part]:
        """Reasoning without markers, and tools in the content."""
        parts: list[Part] = []
        for part in split:
            if isinstance(part, Reasoning):
                parts += _as_reasoning(self._thoughts.push(part.text))
            elif isinstance(part, Content):
                parts += [*self._end_thoughts(), *self._parser.push(part.text)]
        return parts

    def _end_thoughts(self) -> list[Part]:
        """What their parser holds back."""
        return _as_reasoning(self._thoughts.finish())

    def _told(self, parts: Iterable[Part]) -> list[Delta]:
        """What the client is told of these, and the message keeps."""
        deltas: list[Delta] = []
        for part in joined(parts):
            if isinstance(part, Content):
                self._content.append(part.text)
                deltas.append(Delta(content=part.text))
            elif isinstance(part, Reasoning):
                if self._form.include_reasoning:
                    self._reasoning.append(part.text)
                    deltas.append(Delta(reasoning=part.text, reasoning_content=part.text))
            elif part.index == 0 or self._form.tools.parallel:
                deltas.append(self._call(part))
        return deltas

    def _call(self, part: CallBegun | Arguments) -> Delta:
        if isinstance(part, CallBegun):
            self._calls.append(_Call(part.id, part.name))
            return Delta(
                tool_calls=[
                    ToolCallDelta(part.index, FunctionDelta(part.name, ""), part.id, "function")
                ]
            )
        self._calls[part.index].arguments.append(part.text)
        return Delta(tool_calls=[ToolCallDelta(part.index, FunctionDelta(arguments=part.text))])


def _as_reasoning(parts: list[Part]) -> list[Part]:
    return [Reasoning(part.text) for part in parts if isinstance(part, Content)]
