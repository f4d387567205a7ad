"""What a grammar costs per token on the host: masks of a step's rows, and the grammar's way through a token.

    python -m benchmarks.guided_masks --model FOLDER_OR_GGUF --rows 1,8,64

Each row walks through the same JSON answer of 120 records, at a token of its own. No model is loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from kvrelay.embedded import embedded_model
from node.compiling import grammars_for
from openai_api.tokenizer import Tokenizer
from paged_engine.grammar import Grammars, TimedMatcher, masks_of
from paged_engine.guide import Guide
from paged_engine.request import Request
from wire.engine_messages import Submit
from wire.sampling import Constraint, SamplingParams

_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "thing"]},
        "marks": {"type": "array", "items": {"type": "number"}},
        "note": {"anyOf": [{"type": "string", "maxLength": 60}, {"type": "null"}]},
    },
    "required": ["name", "kind", "marks", "note"],
    "additionalProperties": False,
}
_ANSWER = [
    {
        "name": f"Number {i} of the “list”",
        "kind": "place",
        "marks": [i / 8, -i],
        "note": None if i % 3 else "seen twice",
    }
    for i in range(120)
]


def _request(grammars: Grammars, tokens: list[int], eos_token_ids: tuple[int, ...], vocab_size: int) -> Request:
    params = SamplingParams(1 << 20, seed=0, constraint=Constraint("json", json.dumps({"items": _RECORD})))
    assert params.constraint is not None
    request = Request.of(Submit("r", [0], params, generated=tokens), 0.0)
    matcher = TimedMatcher(grammars.matcher(params.constraint))
    request.guide = Guide.of(params, vocab_size=vocab_size, eos_token_ids=eos_token_ids, matcher=matcher)
    return request


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="whose tokenizer; left out, the embedded model's")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model or str(embedded_model()))
    began = time.perf_counter()
    grammars = grammars_for(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    print(f"{tokenizer.vocab_size} tokens; vocabulary made in {time.perf_counter() - began:.2f} s")
    answer = tokenizer.encode(json.dumps(_ANSWER, ensure_ascii=False), False)
    for rows in map(int, args.rows.split(",")):
        starts = [len(answer) // 2 * row // rows for row in range(rows)]
        requests = [
            _request(grammars, answer[:start], tokenizer.eos_token_ids, tokenizer.vocab_size) for start in starts
        ]
        masks_us, follow_us = [], []
        for step in range(min(args.steps, len(answer) // 2)):
            began = time.perf_counter()
            masks_of(requests, tokenizer.vocab_size)
            masked = time.perf_counter()
            for request, start in zip(requests, starts, strict=True):
                assert request.guide is not None
                request.token_ids.append(answer[start + step])
                request.guide.follow(request.token_ids, 1)
                assert request.guide.error is None, request.guide.error
            masks_us.append((masked - began) * 1e6)
            follow_us.append((time.perf_counter() - masked) * 1e6)
        worst = sorted(masks_us)[int(len(masks_us) * 0.99)]
        print(
            f"{rows:4} rows: masks of a step {statistics.median(masks_us):7.0f} us (p99 {worst:.0f}), "
            f"following a token {statistics.median(follow_us) / rows:5.1f} us a row"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
