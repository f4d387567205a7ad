"""The embedded model through a real 1P1D cluster: the same tokens and log-probabilities as alone,
bit for bit.

The cluster proposes tokens and the engine alone does not, which must make no difference either. A
part of `python -m benchmarks.equality`, which takes 50 prompts of up to 1,500 tokens.
"""

import asyncio

import pytest
from real_cluster import EMBEDDED_KEY, Cluster

from benchmarks.equality import in_engine, through, varied_prompts
from kvrelay.machine import embedded_model
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.paged_engine.engine import Engine
from kvrelay.wire.config import EngineConfig

pytestmark = [pytest.mark.cluster, pytest.mark.model]

MAX_TOKENS = 8


def test_alone_in_a_batch_and_disaggregated_give_the_same_tokens(embedded: Cluster) -> None:
    model = str(embedded_model())
    tokenizer = load_tokenizer(model)
    prompts = varied_prompts(tokenizer, 5, longest=250)
    engine = Engine(EngineConfig(model=model, device="cpu", kv_cache_memory_bytes=128 << 20))
    alone, batch = (
        [
            in_engine(
                engine, tokenizer, prompts, seeded=seeded, max_tokens=MAX_TOKENS, alone=one_by_one
            )
            for seeded in (False, True)
        ]
        for one_by_one in (True, False)
    )
    assert batch == alone
    del engine
    (decode,) = embedded.of("decode")
    counted = [
        "kvrelay_fetches_total",
        "kvrelay_fetches_failed_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ]
    before = [decode.metric(name) for name in counted]

    def asked(url: str, *, seeded: bool) -> object:
        sampling = {
            "seeded": seeded,
            "max_tokens": MAX_TOKENS,
            "concurrency": 5,
            "key": EMBEDDED_KEY,
        }
        return asyncio.run(through(url, "SmolLM2-135M-Instruct", prompts, **sampling))

    assert [asked(embedded.url, seeded=seeded) for seeded in (False, True)] == alone
    fetches, failed, drafted, accepted = (
        decode.metric(name) - was for name, was in zip(counted, before, strict=True)
    )
    assert (fetches, failed) == (2 * len(prompts), 0)
    assert 0 < accepted < drafted
    assert asked(decode.url, seeded=True) == alone[1]
