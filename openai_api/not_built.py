"""Request fields that mean something and are not served yet. They are refused, never silently ignored.

One table: the field, the values at which it asks for nothing (None always does), and what to do instead.
"""

from __future__ import annotations

from typing import Any

import msgspec

from wire.errors import RequestError

__all__ = ["refuse_not_built"]

_LEAVE_OUT = "leave it out"

_TABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), _LEAVE_OUT),
    "use_beam_search": ((False,), _LEAVE_OUT),
    "echo": ((False,), _LEAVE_OUT),
    "suffix": (("",), _LEAVE_OUT),
    "functions": (([],), "send tools, which replaced it"),
    "function_call": (("none",), "send tool_choice, which replaced it"),
    "prompt_logprobs": ((), _LEAVE_OUT),
    "prompt_embeds": ((), "send the prompt as text or token ids"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "logits_processors": (([],), "logit_bias is served"),
    "lora_path": ((), _LEAVE_OUT),
    "lora_request": ((), _LEAVE_OUT),
    "chat_template": ((), "start the node with --chat-template FILE"),
    "documents": (([],), "put the documents into a message"),
    "continue_final_message": ((False,), "use /v1/completions"),
    "return_token_ids": ((False,), _LEAVE_OUT),
    "return_tokens_as_token_ids": ((False,), _LEAVE_OUT),
    "priority": ((0,), _LEAVE_OUT),
    "audio": ((), _LEAVE_OUT),
    "modalities": ((["text"],), _LEAVE_OUT),
}

_Asked = msgspec.defstruct("_Asked", [(name, Any, None) for name in _TABLE])
_decoder = msgspec.json.Decoder(_Asked)


def refuse_not_built(body: bytes) -> None:
    """Raise RequestError if a JSON request asks for something of the table."""
    asked = _decoder.decode(body)
    for name, (harmless, instead) in _TABLE.items():
        value = getattr(asked, name)
        if value is not None and not any(type(value) is type(same) and value == same for same in harmless):
            raise RequestError(f"{name} is not supported yet; {instead}", param=name, code="unsupported_parameter")
