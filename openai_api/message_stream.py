"""The text of one choice of a chat into the parts of its message: reasoning first, then tools in what is left. Pure.

`MessageForm` says what a request asks for and what the node's model needs; it makes a `MessageStream` for each choice.
The state of a stream is a function of the text, so a node that goes on with an answer pushes what the client has, and
drops what comes out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from openai_api.body import asked_tools
from openai_api.message_parts import Arguments, CallBegun, CallIds, Content, Part, Reasoning, joined
from openai_api.reasoning import MARKERS, Opening, ReasoningSplit, opening
from openai_api.tool_choice import Choice, ToolUse
from openai_api.tool_parsers import TOOL_PARSERS, JsonParser, NamedParser, TextParser
from openai_api.types import ChatRequest
from wire.errors import RequestError

__all__ = ["MessageForm", "MessageStream", "message_form"]


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How the text of an answer becomes a message."""

    tools: ToolUse
    tool_parser: str = ""
    """The node's, for tool_choice auto; its model's ids of calls are made for the other choices too."""
    opening: Opening | None = None
    """How the answer begins; None: no reasoning parser."""
    include_reasoning: bool = True

    @property
    def plain(self) -> bool:
        """The text is the content."""
        return self.tools.choice is Choice.NONE and self.opening is None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be rendered where they are special tokens. The client never sees those."""
        found: tuple[str, ...] = () if self.opening is None else MARKERS
        if self.tools.choice is Choice.AUTO:
            found += TOOL_PARSERS[self.tool_parser].markers
        return found

    def stream(self, response_id: str, choice: int, hidden: Collection[str]) -> MessageStream:
        """For one choice. `hidden` are the markers that are rendered for the parsers alone."""
        ids = CallIds(response_id, choice, short=self.tool_parser == "mistral")
        parser: TextParser
        match self.tools.choice:
            case Choice.AUTO:
                parser = TOOL_PARSERS[self.tool_parser](ids, hidden)
            case Choice.REQUIRED:
                parser = JsonParser(ids, hidden)
            case Choice.NAMED:
                parser = NamedParser(ids, self.tools.name)
            case Choice.NONE:
                parser = TextParser(ids, hidden)
        return MessageStream(self, parser, ids, hidden)


def message_form(request: ChatRequest, *, tool_parser: str, reasoning_parser: str, prompt_end: str) -> MessageForm:
    """The form of the answers to a request on a node with these parsers (empty: none).

    `prompt_end`: the last 64 characters or more of the prompt, special tokens too. Raises RequestError if the request
    leaves it to the model whether to call a tool and there is no parser that would notice.
    """
    tools = asked_tools(request)
    if tools.choice is Choice.AUTO and not tool_parser:
        raise RequestError(
            "tool_choice auto (the default with tools) needs to know how the model writes calls; start the nodes with "
            f"--tool-call-parser {'|'.join(TOOL_PARSERS)}, or send tool_choice required or the name of a tool",
            param="tool_choice",
        )
    begins = opening(prompt_end) if reasoning_parser else None
    return MessageForm(tools, tool_parser, begins, request.include_reasoning is not False)


class MessageStream:
    """One choice. `push` pieces of text, cut anywhere, and `finish` once."""

    def __init__(self, form: MessageForm, parser: TextParser, ids: CallIds, hidden: Collection[str]) -> None:
        self._form = form
        self._parser = parser
        self._split = None if form.opening is None else ReasoningSplit(form.opening)
        self._thoughts = TextParser(ids, hidden)  # takes the markers out of them
        self._thinks = True

    @property
    def finishes_as_calls(self) -> bool:
        """The finish_reason is `tool_calls` where it would be `stop`; not so for a call that the request named."""
        return self._parser.calls > 0 and self._form.tools.choice is not Choice.NAMED

    def push(self, text: str) -> list[Part]:
        """What has become certain with this text."""
        if self._split is None:
            return self._kept(self._parser.push(text))
        return self._kept(self._pushed(self._split.push(text)))

    def finish(self) -> list[Part]:
        """The rest, now that nothing follows."""
        parts = [] if self._split is None else self._pushed(self._split.finish())
        return self._kept([*parts, *self._end_thoughts(), *self._parser.finish()])

    def _pushed(self, split: list[Part]) -> list[Part]:
        parts: list[Part] = []
        for part in split:
            if isinstance(part, Reasoning):
                parts += _thoughts(self._thoughts.push(part.text))
            elif isinstance(part, Content):
                parts += [*self._end_thoughts(), *self._parser.push(part.text)]
        return parts

    def _end_thoughts(self) -> list[Part]:
        """What the thoughts' parser holds back, once."""
        if not self._thinks:
            return []
        self._thinks = False
        return _thoughts(self._thoughts.finish())

    def _kept(self, parts: list[Part]) -> list[Part]:
        return joined(part for part in parts if self._shown(part))

    def _shown(self, part: Part) -> bool:
        if isinstance(part, Reasoning):
            return self._form.include_reasoning
        if isinstance(part, (CallBegun, Arguments)):
            return part.index == 0 or self._form.tools.parallel
        return True


def _thoughts(parts: list[Part]) -> list[Part]:
    return [Reasoning(part.text) for part in parts if isinstance(part, Content)]
