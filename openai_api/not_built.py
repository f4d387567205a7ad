"""Request fields that mean something and are not served yet. They are refused, never silently
ignored.

One table: the field, the values at which it asks for nothing (None always does), and what to do
instead.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.wire.errors import RequestError

__all__ = ["REFUSED", "refuse_not_built"]

_LEAVE_OUT = "leave it out"
_TEXT_ONLY = "text is all that models served here read"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), "best_of with a temperature finds likely answers too"),
    "suffix": (
        ("",),
        "the models served here write on from the end of a text; put all of it into the prompt",
    ),
    "functions": (([],), "send tools, which replaced it"),
    "function_call": (("none",), "send tool_choice, which replaced it"),
    "prompt_embeds": ((), "send the prompt as text or token ids"),
    "logits_processors": (([],), "logit_bias is served"),
    "lora_path": ((), _LEAVE_OUT),
    "lora_request": ((), _LEAVE_OUT),
    "audio": ((), _LEAVE_OUT),
    "modalities": ((["text"],), _LEAVE_OUT),
    "length_penalty": ((1.0, 1), "it weighs beams, and no beam search is served"),
    "early_stopping": ((False,), "it ends a beam search, and none is served"),
    "structural_tag": ((), "send it in structured_outputs or response_format"),
    "watermarking": ((False,), _LEAVE_OUT),
    "detokenize": ((True,), "POST /inference/v1/generate takes and gives token ids"),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the prompt's end"),
    "logprob_token_ids": (([],), "ask for the likeliest tokens with logprobs"),
    "thinking_token_budget": ((-1,), "max_tokens counts reasoning too"),
    "repetition_detection": ((), "repetition_penalty and max_tokens are served"),
    "stream_interval": ((1,), "every step's tokens are sent at once"),
    "media_io_kwargs": (({},), _TEXT_ONLY),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "return_mm_kwargs": ((True, False), _TEXT_ONLY),
    "vllm_xargs": (({},), "no extension of vLLM's is loaded here"),
    "extra_args": (({},), "no extension of vLLM's is loaded here"),
    "ec_transfer_params": (({},), _TEXT_ONLY),
    "routed_experts_prompt_start": ((0,), "no choice of experts is returned"),
    "return_token_offsets": ((False,), _LEAVE_OUT),
    "return_prompt_text": ((False,), "POST /tokenize tells the prompt's tokens"),
}

_Asked = msgspec.defstruct("_Asked", [(name, Any, None) for name in REFUSED])
_decoder = msgspec.json.Decoder(_Asked)


def refuse_not_built(body: bytes) -> None:
    """Raise RequestError if a JSON request asks for something of the table."""
    asked = _decoder.decode(body)
    for name, (harmless, instead) in REFUSED.items():
        value = getattr(asked, name)
        if value is not None and not any(
            type(value) is type(same) and value == same for same in harmless
        ):
            raise RequestError(
                f"{name} is not supported yet; {instead}", param=name, code="unsupported_parameter"
            )
