"""A choice's text as its message: reasoning, content and tool calls. Pure.

State depends on the text only: a continuing node pushes the client's text and drops the deltas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from kvrelay.openai_api.constraints import ToolUse, tool_use
from kvrelay.openai_api.message_parts import Part, call_id
from kvrelay.openai_api.model_formats import TOOL_FORMATS, Opening, ReasoningFormat, ToolFormat
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tool_parsers import CallParser, NamedParser, TextParser
from kvrelay.openai_api.types import (
    AnyRequest,
    CompletionRequest,
    Delta,
    FunctionDelta,
    ToolCallDelta,
)
from kvrelay.wire.errors import RequestError
from kvrelay.wire.json_object import JsonObject
from kvrelay.wire.sampling import Constraint

__all__ = ["MessageForm", "MessageStream", "message_form"]


_PROMPT_END_TOKENS = 16  # hold the markers of reasoning however they are cut


@dataclass(frozen=True, slots=True)
class MessageForm:
    tools: ToolUse = ToolUse()  # noqa: RUF009 - a constant
    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    opening: Opening = Opening.FREE
    include_reasoning: bool = True
    hidden: dict[int, str] = field(default_factory=dict)
    """Special-token markers by id: parsers get their text, clients do not."""

    def guided(self, constraint: Constraint | None) -> Constraint | None:
        """Return a constraint of the content as one of the whole text."""
        if constraint is None or self.reasoning is None or self.opening is Opening.BEHIND:
            return constraint
        opener = self.reasoning.openers[0] if self.opening is Opening.FREE else ""
        closer = self.reasoning.closers[0]
        return replace(constraint, behind=closer, opener=opener)

    def parser(self) -> TextParser | None:
        hidden, begins = tuple(self.hidden.values()), (self.reasoning, self.opening)
        match self.tools.choice:
            case "auto":
                assert self.tool_format is not None, "message_form has checked it"
                return CallParser(hidden, self.tools.tools, self.tool_format, *begins)
            case "required":
                return CallParser(hidden, self.tools.tools, TOOL_FORMATS["json"], *begins)
            case "named":
                return NamedParser(self.tools.name, hidden, *begins)
            case "none":
                return None if self.reasoning is None else TextParser(hidden, *begins)


def message_form(
    request: AnyRequest,
    tokenizer: Tokenizer,
    prompt: list[int],
    *,
    tool_format: ToolFormat | None,
    reasoning: ReasoningFormat | None,
) -> MessageForm:
    """Return the form of a request's answers. Raises RequestError for auto without a parser."""
    if isinstance(request, CompletionRequest):
        return MessageForm()
    tools = tool_use(request)
    if tools.choice == "auto" and tool_format is None:
        raise RequestError(
            "tool_choice auto (the default with tools) is switched off here: the nodes were "
            "started with --tool-call-parser none; start them without, or send tool_choice "
            "required or the name of a tool",
            param="tool_choice",
        )
    begins = Opening.FREE
    if reasoning is not None:
        end = tokenizer.decode(prompt[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        begins = reasoning.opening(end)
    used = [reasoning, tool_format if tools.choice == "auto" else None]
    markers = [marker for each in used if each is not None for marker in each.markers]
    hidden: dict[int, str] = {}
    if request.skip_special_tokens is not False:
        ids = ((tokenizer.special_id(marker), marker) for marker in markers)
        hidden = {token: marker for token, marker in ids if token is not None}
    shown = request.include_reasoning is not False
    return MessageForm(tools, tool_format, reasoning, begins, shown, hidden)


class MessageStream:
    """A parser of a choice's text; all of it is content without tools and reasoning."""

    def __init__(self, form: MessageForm, response_id: str = "", choice: int = 0) -> None:
        self.rendered = frozenset(form.hidden)
        """Special tokens that have their text here, whatever the request says of them."""
        self._form = form
        self._parser = form.parser()
        short = form.tool_format is not None and form.tool_format.short_ids
        self._id_of = partial(call_id, response_id, choice, short=short)
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []
        self.thinks = False
        """Set once there are thoughts, which are left out of the next turn's prompt."""

    def push(self, text: str) -> list[Delta]:
        if self._parser is None:
            self._texts["content"].append(text)
            return [Delta(content=text)]
        return self._deltas(self._parser.push(text))

    def finish(self) -> list[Delta]:
        return [] if self._parser is None else self._deltas(self._parser.finish())

    def message(self, role: str = "assistant") -> JsonObject:
        """Return the whole message; beside reasoning or calls alone, `content` is None.

        `reasoning` is vLLM's name, always there; others read `reasoning_content`.
        """
        content, reasoning = "".join(self._texts["content"]), "".join(self._texts["reasoning"])
        calls = [
            replace(
                call, index=None, function=FunctionDelta(call.function.name, "".join(arguments))
            )
            for call, arguments in self._calls
        ]
        shown = content if content or not (reasoning or calls) else None
        message = {"role": role, "content": shown, "reasoning": reasoning or None}
        further = {"reasoning_content": reasoning, "tool_calls": calls}
        return message | {name: value for name, value in further.items() if value}

    def finish_reason(self, reason: str) -> str:
        """Return the choice's reason, after `finish`; a named call ends with `stop`."""
        called = bool(self._calls) and self._form.tools.choice != "named"
        return "tool_calls" if called and reason == "stop" else reason

    def _deltas(self, parts: list[Part]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if part.kind == "content":
                self._texts["content"].append(part.text)
                deltas.append(Delta(content=part.text))
            elif part.kind == "reasoning":
                self.thinks = True
                if self._form.include_reasoning:
                    self._texts["reasoning"].append(part.text)
                    deltas.append(Delta(reasoning=part.text, reasoning_content=part.text))
            elif part.at == 0 or self._form.tools.parallel:
                deltas.append(Delta(tool_calls=[self._call(part)]))
        return deltas

    def _call(self, part: Part) -> ToolCallDelta:
        if part.kind == "arguments":
            self._calls[part.at][1].append(part.text)
            return ToolCallDelta(part.at, FunctionDelta(arguments=part.text))
        begun = FunctionDelta(part.text, "")
        call = ToolCallDelta(part.at, begun, self._id_of(part.at), "function")
        self._calls.append((call, []))
        return call
