"""A request's prompt as token ids: the template rendered, tokenized once, and cut to what the client allows."""

from __future__ import annotations

from openai_api.beginning import Beginning, beginning_of, generates_reply
from openai_api.body import kept_tokens
from openai_api.chat_template import render
from openai_api.tokenizer import Tokenizer
from openai_api.tool_choice import asked_tools
from openai_api.types import ChatRequest, CompletionRequest
from wire.errors import RequestError

__all__ = ["Prompts"]


class Prompts:
    """Of one model. `tool_template` is for requests with tools; templates of requests are taken if they are trusted."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        *,
        chat_template: str | None,
        tool_template: str | None,
        trusts_request_templates: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._chat_template, self._tool_template = chat_template, tool_template
        self._trusts_request_templates = trusts_request_templates

    def token_ids(self, request: ChatRequest | CompletionRequest) -> list[int]:
        """The prompt of a chat, or of a completion with one prompt. Raises RequestError."""
        tokens = self._chat(request) if isinstance(request, ChatRequest) else self._completion(request)
        kept = kept_tokens(request, len(tokens), self._max_model_len)
        return tokens[len(tokens) - kept :]

    def beginning(self, request: ChatRequest | CompletionRequest, token_ids: list[int]) -> Beginning:
        """What an answer to this prompt begins with."""
        text = None
        if isinstance(request, CompletionRequest) and request.echo:
            whole = isinstance(request.prompt, str) and request.truncate_prompt_tokens is None
            text = request.prompt if whole else self._tokenizer.decode(token_ids)
        return beginning_of(request, token_ids, text if isinstance(text, str) else None)

    def _completion(self, request: CompletionRequest) -> list[int]:
        if isinstance(request.prompt, str):
            return self._tokenizer.encode(request.prompt, request.add_special_tokens is not False)
        return [token for token in request.prompt if isinstance(token, int)]

    def _chat(self, request: ChatRequest) -> list[int]:
        if request.chat_template is not None and not self._trusts_request_templates:
            raise RequestError(
                "chat_template of a request is refused here: a template is a program; start the nodes with "
                "--trust-request-chat-template to allow it, or with --chat-template FILE",
                param="chat_template",
            )
        tools = asked_tools(request).tools
        variables = {
            "reasoning_effort": request.reasoning_effort,
            "documents": request.documents,
        }
        text = render(
            request.chat_template or (self._tool_template if tools else self._chat_template),
            request.messages,
            bos_token=self._tokenizer.bos_token,
            eos_token=self._tokenizer.eos_token,
            tools=list(tools) or None,
            add_generation_prompt=generates_reply(request),
            continue_final_message=bool(request.continue_final_message),
            **{name: value for name, value in variables.items() if value is not None}
            | (request.chat_template_kwargs or {}),
        )
        # The template has written the special tokens already.
        return self._tokenizer.encode(text, bool(request.add_special_tokens))
