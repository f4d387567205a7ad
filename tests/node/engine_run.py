"""A script: an engine with several ranks runs a few requests and prints their tokens and
log-probabilities.

Takes EngineConfig as JSON on stdin and prints one JSON object. With --forever it prints "running"
and goes on.
"""

from __future__ import annotations

import json
import random
import sys

import msgspec

from kvrelay.node.ranks import join_as_rank_0
from kvrelay.paged_engine.engine import Engine
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import Submit
from kvrelay.wire.sampling import SamplingParams


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    engine = Engine(config, join_as_rank_0(config))
    rng = random.Random(0)
    forever = "--forever" in sys.argv
    requests = []
    for index, length in enumerate((1, 17, 60)):
        tokens = [rng.randrange(3, 200) for _ in range(length)]
        params = SamplingParams(
            12 if not forever else 10**6,
            seed=index,
            temperature=0.7 * (index == 2),
            logprobs=4,
            prompt_logprobs=index or None,
            ignore_eos=True,
            allowed_token_ids=(77,) if index == 1 else None,
        )
        # With adapters: one request of the model alone, the others of an adapter each.
        names = ["", *(name for name, _ in config.adapters)]
        adapter = names[index] if index < len(names) else ""
        requests.append(engine.request(Submit(f"r{index}", tokens, params, adapter=adapter), 0.0))
        requests[-1].guide = engine.guide(params)
        engine.scheduler.add(requests[-1])
    logprobs: dict[str, list[float]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        if forever and engine.counters.steps == 3:
            print("running", flush=True)
        for request in engine.step():
            entries = [*request.prompt_logprobs, *request.new_logprobs]
            logprobs[request.request_id] += [entry.logprob for entry in entries]
            request.prompt_logprobs, request.new_logprobs = [], []
    if engine.adapters is not None:
        for facts in engine.adapters.loaded:
            engine.adapters.retire(facts.name)
        engine.adapters.free_unused(engine.scheduler.live)
        assert not engine.adapters._ending
    engine.close()
    print(
        json.dumps(
            {"tokens": [r.token_ids[r.prompt_tokens :] for r in requests], "logprobs": logprobs}
        )
    )


if __name__ == "__main__":
    main()
