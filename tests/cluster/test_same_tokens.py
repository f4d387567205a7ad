"""The embedded model through a real 1P1D cluster: the same tokens and log-probabilities as alone, bit for bit.

The cluster proposes tokens and the engine alone does not, which must make no difference either. A part of
`python -m benchmarks.equality`, which takes 50 prompts of up to 1,500 tokens.
"""

import asyncio

import pytest
from real_cluster import running

from benchmarks.equality import in_engine, through, varied_prompts
from kvrelay.embedded import embedded_model
from openai_api.tokenizer import Tokenizer
from paged_engine.engine import Engine
from wire.config import EngineConfig
from wire.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.model]

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def model() -> str:
    try:
        return str(embedded_model())
    except ConfigError as why:
        pytest.skip(why.message)


def test_alone_in_a_batch_and_disaggregated_give_the_same_tokens(model, tmp_path):
    tokenizer = Tokenizer.load(model)
    prompts = varied_prompts(tokenizer, 10, longest=300)
    engine = Engine(EngineConfig(model=model, device="cpu", kv_cache_memory=256 << 20))
    alone, batch = (
        [
            in_engine(engine, tokenizer, prompts, seeded=seeded, max_tokens=MAX_TOKENS, alone=one_by_one)
            for seeded in (False, True)
        ]
        for one_by_one in (True, False)
    )
    assert batch == alone
    del engine
    flags = ["--model", model, "--cpu", "--threads", "1", "--kv-cache-memory", str(256 << 20)]
    flags += ["--speculative-tokens", "3", "--ngram-min", "1"]
    with running(tmp_path, prefill=1, decode=1, flags=flags) as cluster:
        name = "SmolLM2-135M-Instruct"
        (decode,) = cluster.of("decode")
        fetched_before = decode.metric("kvrelay_fetches_total")
        handed_over = [
            asyncio.run(through(cluster.url, name, prompts, seeded=seeded, max_tokens=MAX_TOKENS, concurrency=5))
            for seeded in (False, True)
        ]
        assert decode.metric("kvrelay_fetches_total") == fetched_before + 2 * len(prompts)
        assert decode.metric("kvrelay_fetches_failed_total") == 0
        drafted, accepted = (
            decode.metric(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")
        )
        assert 0 < accepted < drafted
        aggregated = asyncio.run(through(decode.url, name, prompts, seeded=True, max_tokens=MAX_TOKENS, concurrency=5))
    assert handed_over == alone
    assert aggregated == alone[1]
