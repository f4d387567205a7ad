"""Settings and values under vLLM's names, and what replaces them.

docs/migration.md has the same table.
"""

from __future__ import annotations

import re

__all__ = ["VALUES", "VLLM", "answer_for"]

_TABLE = """
--kv-transfer-config            --kv-connector (auto, direct, nixl or nccl; the role is the command)
--kv-lease-duration             --lease-s (5 s; renewed by heartbeats in both)
--enable-auto-tool-choice       leave it out; tool calls are parsed unless --tool-call-parser is none
--enable-reasoning              --reasoning-parser (if left out, chosen for the model)
--enable-chunked-prefill        leave it out; prompts are always computed in chunks
--async-scheduling              leave it out; a GPU's next step is always scheduled while one runs
--enable-prompt-tokens-details  leave it out; usage always includes them
--enforce-eager                 has no counterpart; leave it out
--compilation-config            has no counterpart; leave it out
--cuda-graph-sizes              has no counterpart; leave it out
--max-seq-len-to-capture        has no counterpart; leave it out
--attention-backend             has no counterpart; leave it out
--disable-sliding-window        has no counterpart; leave it out
--scheduling-policy             leave it out; the router's queue orders by priority
--num-gpu-blocks-override       --kv-cache-memory-bytes (bytes, not blocks)
--speculative-model             --speculative-config (method ngram; there are no draft models)
--draft-tensor-parallel-size    the only method here is ngram, without a draft model
--max-logprobs                  leave it out; it is 20
--trust-remote-code             leave it out; model code is never run
--tokenizer                     leave it out; the tokenizer is the model's
--tokenizer-mode                leave it out; the tokenizer is the model's
--task                          leave it out; models here only generate
--runner                        leave it out; models here only generate
--hf-overrides                  has no counterpart; change the model's config.json
--rope-scaling                  has no counterpart; change the model's config.json
--chat-template-content-format  leave it out; messages contain only text
--default-chat-template-kwargs  --chat-template (of nodes; requests have chat_template_kwargs)
--max-cpu-loras                 --max-loras (as many as can be loaded at once)
--download-dir                  set the variable HF_HOME
--seed                          requests have seeds, an engine has none
--cpu-offload-gb                --quantization (weights stay on the GPU; fp8 halves them)
--swap-space                    leave it out; preempted requests are computed again
--data-parallel-size            --prefill (and --decode: how many nodes `kvrelay up` starts)
--enable-expert-parallel        has no counterpart; leave it out
--headless                      use `kvrelay rank` on other machines
--pipeline-parallel-size        --tensor-parallel-size (heads are split across GPUs, not layers)
--nnodes           --tensor-parallel-size-local (ranks of this machine; others run `kvrelay rank`)
--node-rank                     --machine (of `kvrelay rank`)
--master-addr                   --tensor-parallel-address (host:port of rank 0)
--master-port                   --tensor-parallel-address (host:port of rank 0)
--distributed-executor-backend  leave it out; `kvrelay rank` starts ranks on other hosts
--api-server-count              --workers (of `kvrelay router`)
--structured-outputs-config     leave it out; llguidance compiles all constraints
--guided-decoding-backend       leave it out; llguidance compiles all constraints
--enable-log-requests           --log-bodies (a line for each request is always logged)
--no-enable-log-requests        leave it out; bodies are logged only with --log-bodies
--disable-log-requests          leave it out; bodies are logged only with --log-bodies
--disable-log-stats             leave it out; /metrics has the statistics
--uvicorn-log-level             leave it out
--disable-uvicorn-access-log    leave it out; there is none
--disable-frontend-multiprocessing leave it out; an engine is always a separate process
--enable-server-load-tracking   leave it out; GET /health counts requests
--enable-force-include-usage    leave it out; clients ask with stream_options
--enable-ssl-refresh            has no counterpart; restart after a renewal
--shutdown-timeout              --drain-deadline-s (of `kvrelay router`)
--limit-mm-per-prompt           leave it out; messages contain only text
--prefiller-hosts               --prefill (http://HOST:PORT, of `kvrelay router`)
--prefiller-ports               --prefill (http://HOST:PORT, of `kvrelay router`)
--decoder-hosts                 --decode (http://HOST:PORT, of `kvrelay router`)
--decoder-ports                 --decode (http://HOST:PORT, of `kvrelay router`)
"""
VLLM: dict[str, str] = dict(re.findall(r"^(\S+) +(.+)$", _TABLE, re.MULTILINE))

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-ac": "--attention-backend",
    "-cc": "--compilation-config",
    "-O": "--compilation-config",
}

VALUES = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "max_model_len": {"auto": "0", "-1": "0"},
}
"""Values that vLLM writes otherwise, and how they are written here."""


def answer_for(name: str) -> str:
    """Return what to write in place of a flag or a key; empty for a name that nobody has."""
    if long := _SHORT.get(name):
        return answer_for(long) or f"here it is {long}"
    flag = "--" + name.lstrip("-").replace("_", "-")
    answer = VLLM.get(flag) or VLLM.get(flag.replace("--no-", "--", 1)) or ""
    return f"here it is {answer}" if answer.startswith("-") else answer
