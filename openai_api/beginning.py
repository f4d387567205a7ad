"""What an answer begins with: whose it is, and what of the prompt the client wants back. Light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.openai_api.types import ChatRequest, CompletionRequest, Message

__all__ = ["Beginning", "beginning_of", "content_text", "generates_reply"]

_ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Beginning:
    """Of every choice of an answer."""

    role: str = _ASSISTANT
    echo: str = ""
    prompt_token_ids: Sequence[int] | None = None
    """If the client asks for token ids."""


def beginning_of(
    request: ChatRequest | CompletionRequest,
    prompt_token_ids: Sequence[int],
    prompt_text: str | None,
) -> Beginning:
    """`prompt_text` is what a completion repeats if it was asked to."""
    ids = prompt_token_ids if request.return_token_ids else None
    if isinstance(request, CompletionRequest):
        return Beginning(echo=(prompt_text or "") if request.echo else "", prompt_token_ids=ids)
    last = request.messages[-1] if request.messages else None
    role = _ASSISTANT if generates_reply(request) or last is None else last.role
    echo = content_text(last) if request.echo and last is not None and last.role == role else ""
    return Beginning(role, echo, ids)


def generates_reply(request: ChatRequest) -> bool:
    """Whether the prompt ends with the head of a new message; else the last message goes on."""
    return request.add_generation_prompt is not False and not request.continue_final_message


def content_text(message: Message) -> str:
    """A message's content as one text: parts are joined by line breaks, null is empty."""
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)
