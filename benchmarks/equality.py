"""Same tokens everywhere: alone == in a batch == disaggregated, and equal to transformers except at
near-ties.

    python -m benchmarks.equality --prompts 50 --max-tokens 24

Starts 1P1D and a router with the embedded model; compares text and, bit for bit, the
log-probability of every token. Needs the dev extra (transformers). Exits with 1 if anything differs
that is not a near-tie with transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.local_cluster import running
from kvrelay.machine import embedded_model
from kvrelay.openai_api.tokenizer import Tokenizer
from kvrelay.openai_api.tokenizer_files import load_tokenizer
from kvrelay.paged_engine.engine import Engine
from kvrelay.paged_engine.request import Request
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams

__all__ = ["Answer", "in_engine", "through", "varied_prompts"]

# Below this gap of logits a difference from transformers is a near-tie: fp32 sums of 576 terms
# differ by 1e-5 to 1e-4.
NEAR_TIE = 1e-2

_SENTENCES = (
    "The harbour was quiet when the last ferry left.",
    "def add(a, b):\n    return a + b\n",
    "In 1969, about 600 million people watched the landing on the Moon.",
    "Quelle heure est-il ? Il est déjà tard, répondit-elle.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
    "水は低いところへ流れる。",
    "She packed three apples, two maps and a torch 🔦 into the bag.",
    '{"name": "relay", "size": 42, "tags": ["kv", "cache"]}',
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that must be equal: text, and log-probabilities of its tokens as exact floats."""

    text: str
    logprobs: tuple[float, ...]


def varied_prompts(
    tokenizer: Tokenizer, count: int, longest: int, seed: int = 0
) -> list[list[int]]:
    """Token ids of prompts from 1 to `longest` tokens: prose, code, numbers, other scripts, shared
    beginnings.
    """
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, longest] + [
        int(longest ** rng.uniform(0.2, 1.0)) for _ in range(count)
    ]
    prompts = []
    for length in lengths[:count]:
        text = " ".join(rng.choice(_SENTENCES) for _ in range(1 + length // 4))
        start = "You are a careful assistant. " * 4 if rng.random() < 0.3 else ""
        prompts.append(tokenizer.encode(start + text, add_special_tokens=False)[:length])
    return prompts


def sampling(index: int, seeded: bool, max_tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "logprobs": 0,
        "temperature": 0.0,
    }
    if seeded:
        fields |= {
            "temperature": 0.8,
            "top_p": 0.95,
            "top_k": 50,
            "seed": 1000 + index,
            "presence_penalty": 0.3,
        }
    return fields


def in_engine(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    *,
    seeded: bool,
    max_tokens: int,
    alone: bool,
) -> list[Answer]:
    """Answers of an engine in this process, one request at a time or all at once."""
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(**{"seed": 0, **sampling(i, seeded, max_tokens)})
        request = Request.from_submit(Submit(f"{i}", prompt, params), time.monotonic())
        engine.scheduler.add(request)
        requests.append(request)
        while alone and engine.scheduler.has_work:
            engine.step()
    while engine.scheduler.has_work:
        engine.step()
    return [
        Answer(
            tokenizer.decode(r.token_ids[r.prompt_tokens :]),
            tuple(x.logprob for x in r.new_logprobs),
        )
        for r in requests
    ]


async def through(
    url: str,
    model: str,
    prompts: list[list[int]],
    *,
    seeded: bool,
    max_tokens: int,
    concurrency: int,
    key: str = "",
) -> list[Answer]:
    """Answers of an endpoint, streamed for every second prompt. `key`: the API key, if it wants
    one.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answers: list[Answer | None] = [None] * len(prompts)
    waiting = list(range(len(prompts)))
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=600), headers=headers
    ) as session:

        async def worker() -> None:
            while waiting:
                i = waiting.pop(0)
                body = {
                    "model": model,
                    "prompt": prompts[i],
                    **sampling(i, seeded, max_tokens),
                    "stream": i % 2 == 1,
                }
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    raw = await answer.read()
                    if answer.status != 200:
                        raise RuntimeError(f"prompt {i}: {answer.status} {raw[:300]!r}")
                    answers[i] = _streamed(raw) if body["stream"] else _whole(json.loads(raw))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return [answer for answer in answers if answer is not None]


def _whole(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    return Answer(choice["text"], tuple(choice["logprobs"]["token_logprobs"]))


def _streamed(raw: bytes) -> Answer:
    text, logprobs = "", []
    for line in raw.split(b"\n"):
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"]))
        choice = chunk["choices"][0]
        text += choice["text"]
        if choice["logprobs"]:
            logprobs += choice["logprobs"]["token_logprobs"]
    return Answer(text, tuple(logprobs))


def against_transformers(
    model: str, tokenizer: Tokenizer, prompts: list[list[int]], answers: list[Answer]
) -> int:
    """Print how greedy text compares with transformers'; the number of differences that are no
    near-tie.
    """
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        Path(model).parent, gguf_file=Path(model).name, dtype=torch.float32
    ).eval()
    unexplained = equal = 0
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        count = len(answer.logprobs)
        with torch.no_grad():
            theirs = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        tokens = theirs.sequences[0, len(prompt) :].tolist()
        if tokenizer.decode(tokens) == answer.text:
            equal += 1
            continue
        ours = _token_ids(tokenizer, answer.text, tokens)
        top = theirs.scores[ours].topk(2).values[0]
        gap = float(top[0] - top[1])
        unexplained += gap > NEAR_TIE
        print(
            f"  prompt {i} ({len(prompt)} tokens): differs from token {ours} on, logit gap "
            f"{gap:.2e}"
        )
    print(
        f"  transformers: {equal} of {len(prompts)} equal, {unexplained} differences that are no "
        f"near-tie"
    )
    return unexplained


def _token_ids(tokenizer: Tokenizer, text: str, tokens: list[int]) -> int:
    for count in range(1, len(tokens) + 1):
        if not text.startswith(tokenizer.decode(tokens[:count]).rstrip("\ufffd")):
            return count - 1
    return len(tokens) - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--no-transformers", action="store_true")
    args = parser.parse_args()
    model = str(embedded_model())
    tokenizer = load_tokenizer(model)
    prompts = varied_prompts(tokenizer, args.prompts, args.longest)
    lengths = [len(prompt) for prompt in prompts]
    print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, {args.max_tokens} "
        f"tokens each"
    )
    differences = 0
    runs: dict[str, dict[bool, list[Answer]]] = {}
    for name, alone in (("alone", True), ("in one batch", False)):
        engine = Engine(EngineConfig(model=model, device="cpu"))
        runs[name] = {
            seeded: in_engine(
                engine, tokenizer, prompts, seeded=seeded, max_tokens=args.max_tokens, alone=alone
            )
            for seeded in (False, True)
        }
        del engine
    with running("up", "--cpu", "--prefill=1", "--decode=1", f"--model={model}") as (url, _):
        runs["disaggregated"] = {
            seeded: asyncio.run(
                through(
                    url,
                    "SmolLM2-135M-Instruct",
                    prompts,
                    seeded=seeded,
                    max_tokens=args.max_tokens,
                    concurrency=8,
                )
            )
            for seeded in (False, True)
        }
    for name in ("in one batch", "disaggregated"):
        for seeded in (False, True):
            wrong = [
                i
                for i, pair in enumerate(
                    zip(runs["alone"][seeded], runs[name][seeded], strict=True)
                )
                if pair[0] != pair[1]
            ]
            differences += len(wrong)
            kind = "seeded" if seeded else "greedy"
            print(
                f"  {kind}: {name} == alone for {len(prompts) - len(wrong)} of {len(prompts)} "
                f"prompts {wrong or ''}"
            )
    if not args.no_transformers:
        differences += against_transformers(model, tokenizer, prompts, runs["alone"][False])
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
