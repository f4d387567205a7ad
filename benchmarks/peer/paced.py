"""Arms on a machine without GPUs: real processes, whose steps take what a rate card says.

Our own client asks, since vLLM's needs vLLM. Where the machine is too slow for them, all times are
`scale` times as long, and told as if they were not.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.peer.arms import MODEL_NAME
from benchmarks.peer.client import Ask, Figures, Seen, figures_of
from benchmarks.peer.model import word
from benchmarks.peer.works import BLOCK_TOKENS, Request
from kvrelay.load.client import AnswerReader, http_session, stream
from kvrelay.load.measures import Record
from kvrelay.planner.rate_card import RateCard, read_card

__all__ = ["SHAPE", "Paced"]

_VOCABULARY = 32_000
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 1 << 17,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
_TOKEN_BYTES = 2 * 16 * 4  # of its KV
_STEP_TOKENS = 8_192  # a GPU's default
_BEGINS_S = 0.5
_WARM_UP, _WARM_UPS = Request(0.0, 64, 4), 4
_ANSWER = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}


class Paced:
    """A pace of servers and of the client that asks them."""

    def __init__(self, card: Path, scale: float) -> None:
        """Read the card. Raises ConfigError."""
        self._file, self.scale = card.resolve(), scale
        self._card: RateCard = read_card(card)

    @property
    def env(self) -> Mapping[str, str]:
        folder = Path(__file__).parent / "paced_engine"
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        return {"PYTHONPATH": path, "PACED_BY": str(self._file), "PACED_SCALE": str(self.scale)}

    @property
    def flags(self) -> list[str]:
        card = self._card
        return [
            "--device=cpu",
            "--threads=1",
            f"--max-num-batched-tokens={_STEP_TOKENS}",
            f"--max-num-seqs={card.max_num_seqs}",
            f"--block-size={card.block_size}",
            f"--kv-cache-memory-bytes={card.kv_tokens * _TOKEN_BYTES}",
        ]

    def ask(self, asks: Sequence[Ask], seed: int) -> list[Figures]:
        """Send all of these loads at the same time. `seed`: of the texts."""
        return asyncio.run(self._ask(asks, seed))

    async def _ask(self, asks: Sequence[Ask], seed: int) -> list[Figures]:
        seen = await asyncio.gather(*(self._send(each, seed) for each in asks))
        return [figures_of(of, each.load) for of, each in zip(seen, asks, strict=True)]

    async def _send(self, asked: Ask, seed: int) -> list[Seen]:
        load, rng = asked.load, random.Random(seed)
        bodies = [_body(request, rng, seed) for request in load.requests]
        urls = [f"{url}/v1/completions" for url in asked.urls]
        turns = asyncio.Semaphore(load.clients or len(bodies))
        async with http_session("", {}) as session:
            for url in urls * _WARM_UPS:
                warm_up = AnswerReader(Record(0, 0, 0.0, 0.0))
                await stream(session, url, _body(_WARM_UP, rng, seed), warm_up, 0.0)
            began = time.monotonic() + _BEGINS_S

            async def send(at: int, request: Request) -> Seen:
                await asyncio.sleep(began + request.at_s * self.scale - time.monotonic())
                async with turns:
                    sent_s = time.monotonic() - began
                    record = Record(0, 0, request.at_s, sent_s, asked_tokens=request.output)
                    answer = AnswerReader(record)
                    await stream(session, urls[at % len(urls)], bodies[at], answer, began)
                answer.finish(exact=True)
                times = [sent_s, record.first_s - sent_s, *record.gaps_s]
                sent_s, ttft_s, *gaps_s = (each / self.scale for each in times)
                output = 0 if record.failure else record.output_tokens
                return Seen(request, sent_s, record.prompt_tokens, output, ttft_s, gaps_s)

            return await asyncio.gather(*map(send, range(len(bodies)), load.requests))


def _body(request: Request, rng: random.Random, seed: int) -> bytes:
    parts = [_text(random.Random(f"{seed} {block}"), BLOCK_TOKENS) for block in request.blocks]
    words = [each for part in parts for each in part][: request.prompt]
    words += _text(rng, request.prompt - len(words))
    fields = {"model": MODEL_NAME, "prompt": " ".join(words), "max_tokens": request.output}
    return msgspec.json.encode(fields | _ANSWER | {"temperature": 0})


def _text(rng: random.Random, words: int) -> list[str]:
    return [word(rng.randrange(_VOCABULARY - 3)) for _ in range(words)]
