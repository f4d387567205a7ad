"""A choice's text as its message: reasoning, content and tool calls. Pure.

State depends on the text only: a node that continues an answer pushes the client's text and drops
the deltas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from kvrelay.openai_api.message_parts import (
    Arguments,
    CallBegun,
    CallIds,
    Content,
    Part,
    Reasoning,
    merged,
)
from kvrelay.openai_api.model_formats import TOOL_FORMATS, ReasoningFormat, ToolFormat
from kvrelay.openai_api.reasoning import Opening
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tool_choice import Choice, ToolUse, tool_use
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

__all__ = ["MessageForm", "MessageStream", "PlainMessage", "message_form"]


_ROLE = "assistant"
_PROMPT_END_TOKENS = 16  # hold the markers of reasoning however they are cut


class PlainMessage:
    """A parser for which all text is content, and the base of others."""

    def __init__(self) -> None:
        self.rendered: frozenset[int] = frozenset()
        """Special tokens that have their text here, whatever the request says of them."""
        self._text: list[str] = []

    def push(self, text: str) -> list[Delta]:
        """Return what more text adds."""
        self._text.append(text)
        return [Delta(content=text)]

    def finish(self) -> list[Delta]:
        """Return the rest."""
        return []

    def message(self) -> ReplyMessage:
        """Return the message, after `finish`."""
        return ReplyMessage(_ROLE, "".join(self._text))

    def finish_reason(self, reason: str) -> str:
        """Return the choice's reason, after `finish`."""
        return reason


@dataclass(frozen=True, slots=True)
class MessageForm:
    """A form of a request's answers."""

    tools: ToolUse
    tool_format: ToolFormat | None = None
    """The node's."""
    calls: int = 0
    """Calls in the chat so far."""
    reasoning: ReasoningFormat | None = None
    opening: Opening = Opening.FREE
    include_reasoning: bool = True
    hidden: dict[int, str] = field(default_factory=dict)
    """Special-token markers by id: parsers get their text, clients do not."""

    @property
    def plain(self) -> bool:
        return self.tools.choice is Choice.NONE and self.reasoning is None

    def guided(self, constraint: Constraint | None) -> Constraint | None:
        """Return a constraint of the content as one of the whole text."""
        if constraint is None or self.reasoning is None or self.opening is Opening.BEHIND:
            return constraint
        marks = self.reasoning.marks
        opener = marks.openers[0] if self.opening is Opening.FREE else ""
        return msgspec.structs.replace(constraint, behind=marks.closers[0], opener=opener)

    def parser(self, response_id: str, choice: int) -> PlainMessage:
        if self.plain:
            return PlainMessage()
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
    """Return the form of a request's answers. Raises RequestError for auto without a parser."""
    if isinstance(request, CompletionRequest):
        return MessageForm(ToolUse())
    tools = tool_use(request)
    if tools.choice is Choice.AUTO and tool_format is None:
        raise RequestError(
            "tool_choice auto (the default with tools) is switched off here: the nodes were "
            "started with --tool-call-parser none; start them without, or send tool_choice "
            "required or the name of a tool",
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
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class MessageStream(PlainMessage):
    """A parser of reasoning and tool calls."""

    def __init__(self, form: MessageForm, content: TextParser, thoughts: TextParser) -> None:
        super().__init__()
        self.rendered = frozenset(form.hidden)
        self._form = form
        self._parser = content
        self._split = None if form.reasoning is None else form.reasoning.split(form.opening)
        self._thoughts = thoughts
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    def push(self, text: str) -> list[Delta]:
        if self._split is None:
            return self._deltas(self._parser.push(text))
        return self._deltas(self._split_parts(self._split.push(text)))

    def finish(self) -> list[Delta]:
        parts = [] if self._split is None else self._split_parts(self._split.finish())
        return self._deltas([*parts, *self._end_thoughts(), *self._parser.finish()])

    def message(self) -> ReplyMessage:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        calls = [
            ToolCall(call.id, CalledFunction(call.name, "".join(call.arguments)))
            for call in self._calls
        ]
        shown = content if content or not (reasoning or calls) else None
        return ReplyMessage(_ROLE, shown, reasoning or None, reasoning or UNSET, calls or UNSET)

    def finish_reason(self, reason: str) -> str:
        """Return the choice's reason; a named call ends with `stop`."""
        called = bool(self._calls) and self._form.tools.choice is not Choice.NAMED
        return "tool_calls" if called and reason == "stop" else reason

    def _split_parts(self, split: list[Part]) -> list[Part]:
        parts: list[Part] = []
        for part in split:
            if isinstance(part, Reasoning):
                parts += _as_reasoning(self._thoughts.push(part.text))
            elif isinstance(part, Content):
                parts += [*self._end_thoughts(), *self._parser.push(part.text)]
        return parts

    def _end_thoughts(self) -> list[Part]:
        return _as_reasoning(self._thoughts.finish())

    def _deltas(self, parts: Iterable[Part]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in merged(parts):
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
