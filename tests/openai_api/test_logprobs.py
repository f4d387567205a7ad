"""Log-probabilities of prompts as answers show them."""

from __future__ import annotations

import pytest

from kvrelay.openai_api.logprobs import ScoredPrompt
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.wire.errors import RequestError
from kvrelay.wire.outputs import TokenLogprobs


def scored(ids: list[int]) -> ScoredPrompt:
    entries = [
        TokenLogprobs(token, -3.5, (65, token, 66), (-0.25, -3.5, -float("inf")), rank=2 + place)
        for place, token in enumerate(ids[1:])
    ]
    return ScoredPrompt(ids, entries)


@pytest.mark.model
def test_what_the_tokenizer_adds_has_no_place_in_the_text(smollm2: Tokenizer) -> None:
    special = smollm2.special_id("<|im_start|>")
    assert special is not None
    words = smollm2.encode("Hello there", add_special_tokens=False)
    before = scored([special, *words])
    assert before.echoed(smollm2, 0, "Hello there").text_offset == [0, 0, 5]
    assert before.echoed(smollm2, 0, "<|im_start|>Hello there").text_offset == [0, 12, 17]
    within = [*words, special, words[0]]
    assert scored(within).echoed(smollm2, 0, smollm2.decode(within)).text_offset == [0, 5, 11, 11]


def test_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(
        RequestError, match="of 1 tokens of the prompt were handed over, and it has 3"
    ):
        ScoredPrompt([1, 2, 3], [TokenLogprobs(2, -1.0)])
