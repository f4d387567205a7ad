"""What the HTTP side of a node costs per token, without any engine; and whether a long prompt holds up other streams.

    python -m benchmarks.http_side [--model PATH] [--rounds 5] [--stall]

Rows are microseconds of this process's CPU time per token, medians of rounds: from the engine's message to the packed
frame (message decoded, text, stop strings, log-probabilities, JSON, SSE, frame), for 32 streams that get one token each
per step; and from a request's body to its submit, per token of its prompt. `--stall` starts a node with the embedded
model, streams four answers, and compares the gaps between their tokens with and without prompts of 32,000 tokens that
are tokenized meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec

from benchmarks.local_cluster import running
from kvrelay.embedded import embedded_model
from load.measures import percentile
from node.serving import Call, Serving
from openai_api.leg import Leg
from openai_api.tokenizer import Tokenizer
from wire.config import Role
from wire.engine_messages import EngineReady, RequestUpdate, StepOutputs
from wire.frames import pack
from wire.outputs import Load, TokenLogprobs

STREAMS, TOKENS = 32, 256
LONG_PROMPT_TOKENS = 32_000
TEXT = (
    "The mistake that people make about rivers is to think of them as lines. A river is an area; it is what the rain "
    "has decided to do with the land, and the line on the map is only where most of that decision shows. "
)
ANSWERS: dict[str, dict[str, Any]] = {
    "chat, streamed": {"stream": True},
    "chat, streamed, 4 stop strings": {"stream": True, "stop": ["\n\nUser:", "###", "END", "</answer>"]},
    "chat, streamed, 5 log-probabilities": {"stream": True, "logprobs": True, "top_logprobs": 5},
    "chat, whole": {},
}


def _serving(model: str) -> Serving:
    tokenizer = Tokenizer.load(model)
    info = EngineReady(
        engine_id="none",
        generation="none",
        model_name="model",
        vocab_size=tokenizer.vocab_size,
        max_model_len=1 << 20,
        block_size=16,
        num_blocks=1,
        kv_bytes_per_token=1,
        eos_token_ids=list(tokenizer.eos_token_ids),
        transfer_host="127.0.0.1",
        transfer_port=1,
        load_s=0.0,
    )
    return Serving(Role.AGGREGATED, "model", None, tokenizer, info)


def _body(text: str, fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"model": "model", "messages": [{"role": "user", "content": text}], **fields})


def _leg(serving: Serving, call: Call) -> Leg:
    request = serving.read(call)
    return serving.legs(call, request, serving.token_ids(request))[0]


def answer_us(serving: Serving, fields: dict[str, Any], tokens: Sequence[int]) -> float:
    """Microseconds per token of `STREAMS` answers of the same tokens."""
    legs: dict[str, Leg] = {}
    for i in range(STREAMS):
        leg = _leg(serving, Call(True, _body("Hello", {**fields, "max_tokens": TOKENS + 1}), f"bench-{i}"))
        legs[leg.submits[0].request_id] = leg
    top = 5 if fields.get("logprobs") else None
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(StepOutputs).decode
    steps = []
    for token in tokens:
        ids, values = tuple(range(300, 305)), (-1.0, -2.0, -3.0, -4.0, -5.0)
        logprobs = None if top is None else [TokenLogprobs(token, -0.5, ids, values)]
        steps.append(encode(StepOutputs([RequestUpdate(name, [token], logprobs) for name in legs], Load())))
    began = time.process_time()
    for step in steps:
        outputs = decode(step)
        for update in outputs.updates:
            for frame in legs[update.request_id].frames(update, outputs.load):
                pack(frame)
    spent_s = time.process_time() - began
    assert not any(leg.done for leg in legs.values()), "an answer ended early"
    return spent_s / (len(tokens) * STREAMS) * 1e6


def prompt_us(serving: Serving, prompt_tokens: int) -> float:
    """Microseconds per token of a prompt, from its body to what the engine is sent."""
    text = TEXT * (prompt_tokens // 42)
    began = time.process_time()
    leg = _leg(serving, Call(True, _body(text, {"max_tokens": 1}), "bench"))
    msgspec.msgpack.encode(leg.submits[0])
    return (time.process_time() - began) / len(leg.submits[0].prompt_token_ids) * 1e6


async def gaps_ms(url: str, *, disturbed: bool) -> list[float]:
    """Milliseconds between the events of four streams; if `disturbed`, beside prompts that are tokenized."""
    gaps: list[float] = []
    name = (httpx2.get(f"{url}/v1/models").json())["data"][0]["id"]
    ended = asyncio.Event()

    async def stream(seed: int) -> None:
        body = {"model": name, "messages": [{"role": "user", "content": "Tell me a story."}], "seed": seed}
        body |= {"stream": True, "max_tokens": 150, "ignore_eos": True}
        before = None
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                now = time.perf_counter()
                if before is not None:
                    gaps.append((now - before) * 1e3)
                before = now

    async def disturb() -> None:
        while not ended.is_set():
            # Longer than the model's context: tokenized, counted, refused.
            body = {"model": name, "prompt": TEXT * (LONG_PROMPT_TOKENS // 42), "max_tokens": 1}
            answer = await http.post(f"{url}/v1/completions", json=body)
            assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text

    async with httpx2.AsyncClient(timeout=120) as http:
        disturber = asyncio.create_task(disturb()) if disturbed else None
        await asyncio.gather(*(stream(seed) for seed in range(4)))
        ended.set()
        if disturber is not None:
            await disturber
    # Lines come in pairs, the second empty: only gaps between events are of interest.
    return [gap for gap in gaps if gap > 0.05]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stall", action="store_true")
    args = parser.parse_args()
    serving = _serving(args.model or str(embedded_model()))
    tokens = _leg(serving, Call(True, _body(TEXT * 12, {"max_tokens": 1}), "t")).submits[0].prompt_token_ids[-TOKENS:]
    random.Random(1).shuffle(tokens)
    for name, fields in ANSWERS.items():
        rounds = [answer_us(serving, fields, tokens) for _ in range(args.rounds)]
        print(f"{name:40}{statistics.median(rounds):8.2f} us per token", flush=True)
    for length in (1_000, LONG_PROMPT_TOKENS):
        rounds = [prompt_us(serving, length) for _ in range(args.rounds)]
        print(f"{f'prompt of {length} tokens':40}{statistics.median(rounds):8.2f} us per token", flush=True)
    if args.stall:
        with running("serve", "--cpu", "--threads=1") as url:
            asyncio.run(gaps_ms(url, disturbed=False))
            for disturbed in (False, True, False, True):
                gaps = sorted(asyncio.run(gaps_ms(url, disturbed=disturbed)))
                what = "while long prompts are tokenized" if disturbed else "undisturbed"
                p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
                print(f"ITL {what:36} p50 {p50:6.1f} ms, p99 {p99:6.1f}, longest {gaps[-1]:6.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
