"""No field of vLLM's requests is ignored: each is served, or refused by name unless it asks for
nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrelay.openai_api.body import REFUSED, decode_chat, decode_completion
from kvrelay.openai_api.types import ChatRequest, CompletionRequest
from kvrelay.wire.errors import RequestError

# Of vllm/entrypoints/openai, as of 2026-11; with those of SamplingParams that its clients also
# send.
BOTH = [
    "model",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "early_stopping",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "allowed_token_ids",
    "prompt_logprobs",
    "logprob_token_ids",
    "bad_words",
    "detokenize",
    "add_special_tokens",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "extra_args",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
    "echo",
    "logits_processors",
]
CHAT = [
    "messages",
    "top_logprobs",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "include_reasoning",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "return_prompt_text",
]
COMPLETION = ["prompt", "suffix", "prompt_embeds", "best_of"]


def decoded(**fields: Any) -> ChatRequest:
    return decode_chat(
        msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields)
    )


def completed(**fields: Any) -> CompletionRequest:
    return decode_completion(msgspec.json.encode({"model": "m", "prompt": "x"} | fields))


@pytest.mark.parametrize(
    ("request_type", "own"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)]
)
def test_every_field_of_vllm_is_known_or_refused(
    request_type: type[msgspec.Struct], own: list[str]
) -> None:
    assert {*BOTH, *own} - {*request_type.__struct_fields__} - REFUSED.keys() == set()


@pytest.mark.parametrize(
    ("field", "same", "other"),
    [
        ("length_penalty", 1.0, 1.5), ("length_penalty", 1, 0), ("early_stopping", False, True),
        ("early_stopping", False, "never"), ("vllm_xargs", {}, {"a": 1}), ("mm_processor_kwargs", {}, {"fps": 1}),
        ("media_io_kwargs", {}, {"video": {}}), ("detokenize", True, False), ("thinking_token_budget", -1, 10),
        ("truncation_side", "left", "right"), ("logprob_token_ids", [], [5]), ("stream_interval", 1, 4),
        ("structural_tag", None, "{}"),
        ("watermarking", False, True), ("repetition_detection", None, {"max_pattern_size": 3}),
        ("return_prompt_text", False, True), ("routed_experts_prompt_start", 0, 1), ("extra_args", {}, {"a": 1}),
    ],
)  # fmt: skip
def test_a_value_that_changes_nothing_is_accepted_and_any_other_is_refused(
    field: str, same: Any, other: Any
) -> None:
    for make in (decoded, completed):
        make(**{field: same})
        with pytest.raises(RequestError, match=f"{field} is not supported yet") as refused:
            make(**{field: other})
        assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize("wanted", [True, False])
def test_spaces_between_special_tokens_are_put_by_no_tokenizer_here(wanted: bool) -> None:
    assert decoded(spaces_between_special_tokens=wanted).spaces_between_special_tokens is wanted
    with pytest.raises(RequestError, match="wrong type"):
        decoded(spaces_between_special_tokens="yes")


@pytest.mark.parametrize(
    "wanted", ["", "a b", "x" * 129, "é", "a\nb", "cmpl-___prefill_addr_10.0.0.9:1_x", 7]
)
def test_a_request_id_that_cannot_be_one_is_refused(wanted: Any) -> None:
    for make in (decoded, completed):
        assert make(request_id="my.id-1:2_3").request_id == "my.id-1:2_3"
        with pytest.raises(RequestError) as refused:
            make(request_id=wanted)
        assert refused.value.param == "request_id"
