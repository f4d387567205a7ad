"""Proxies that others wrote drive our nodes, and their answers are those of our own router.

Two of them as doubles (proxy_doubles.py), and the real vllm-router, from the environment of
tests/clients.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import pytest
from proxy_doubles import Proxy, llm_d_sidecar, serving, toy_proxy
from real_cluster import Cluster, counted, free_port, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_lost")]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "<hi> & hello there"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat by its newer limit": (CHAT, {"messages": MESSAGES, "max_completion_tokens": 12}),
    "token ids": (COMPLETIONS, {"prompt": list(range(5, 70)), "max_tokens": 12}),
    "several choices": (CHAT, {"messages": MESSAGES, "max_tokens": 9, "n": 3}),
    "log-probabilities": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    ),
    "a stop string": (COMPLETIONS, {"prompt": "y" * 40, "max_tokens": 30, "stop": ["f", "a", " "]}),
    "one token": (COMPLETIONS, {"prompt": "one", "max_tokens": 1}),
    "a forced tool": (
        CHAT,
        {"messages": MESSAGES, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"},
    ),
}


@pytest.fixture(scope="module")
def cluster(small: Cluster) -> Cluster:
    return small


@pytest.fixture(scope="module")
def vllm_router(clients: Path, cluster: Cluster) -> Iterator[str]:
    """The URL of the real one in front of the same nodes."""
    command = clients / "vllm-router"
    if not command.exists():
        pytest.skip("vllm-router has no wheel for this machine")
    port, log = free_port(), cluster.folder / "vllm-router.log"
    argv = [str(command), "--vllm-pd-disaggregation", f"--port={port}"]
    argv += [f"--prometheus-port={free_port()}"]
    argv += ["--worker-startup-check-interval", "1", "--policy", "round_robin"]
    for node in cluster.nodes:
        argv += [f"--{node.role}", node.url]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=out, env=environment, cwd=cluster.folder
        )
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            return httpx2.get(f"{url}/health", timeout=60).status_code == 200
        except httpx2.HTTPError:
            return False

    try:
        wait_until(ready, "vllm-router ready", interval_s=0.1)
        yield url
    finally:
        process.terminate()
        process.wait(15)


@pytest.fixture(params=["vllm-router", "toy_proxy_server.py", "llm-d"])
async def proxy(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[str]:
    if request.param == "vllm-router":
        yield request.getfixturevalue("vllm_router")
        return
    one: Proxy = toy_proxy if request.param == "toy_proxy_server.py" else llm_d_sidecar
    async with serving(one, *(node.url for node in cluster.nodes)) as url:
        yield url


async def answered(
    session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]
) -> Any:
    """Choices and token counts of an answer, of a stream put together."""
    async with session.post(url + path, json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    if not body.get("stream"):
        whole = json.loads(text)
        usage = whole["usage"]
        return (
            [_plain(choice) for choice in whole["choices"]],
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
    *events, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", ""), text[-300:]
    texts: dict[int, list[Any]] = {}
    usage = None
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        assert "error" not in chunk, text[-300:]
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            said = choice.get("delta", choice)
            told = texts.setdefault(choice["index"], ["", "", [], None])
            told[0] += said.get("content") or said.get("text") or ""
            for call in said.get("tool_calls") or ():
                told[1] += call["function"]["arguments"]
            told[2] += [choice["logprobs"]] if choice.get("logprobs") else []
            told[3] = choice["finish_reason"] or told[3]
    return texts, usage and usage["completion_tokens"]


def _plain(choice: dict[str, Any]) -> Any:
    for call in (choice.get("message") or {}).get("tool_calls") or ():
        call["id"] = "made of the answer's own id"
    return choice


async def test_answers_are_those_of_our_own_router(proxy: str, cluster: Cluster) -> None:
    decode = cluster.nodes[1]
    asked = [(name, stream) for name in CASES for stream in (False, True)]
    answers: dict[str, list[Any]] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        for url in (cluster.url, proxy):
            fetches, failed = (
                decode.metric(f"kvrelay_fetches_{kind}total") for kind in ("", "failed_")
            )
            for name, stream in asked:
                path, fields = CASES[name]
                body = {"model": "tiny", "seed": 11, "temperature": 0.7, "stream": stream, **fields}
                if stream:
                    body["stream_options"] = {"include_usage": True}
                answers.setdefault(url, []).append(await answered(session, url, path, body))
    for case, ours, theirs in zip(asked, answers[cluster.url], answers[proxy], strict=True):
        assert theirs == ours, case
    # Where the first token ends the answer nothing is handed over.
    least = fetches + sum(name not in ("a stop string", "one token") for name, _ in asked)
    wait_until(
        lambda: decode.metric("kvrelay_fetches_total") >= least, "KV fetched for every request"
    )
    counted([decode], "kvrelay_fetches_failed_total", failed)


async def test_an_answer_without_a_seed_and_several_prompts_come_through_too(
    proxy: str, cluster: Cluster
) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        for _ in range(3):  # a seed that is drawn must survive a proxy that makes floats of numbers
            body = {"model": "tiny", "prompt": "a" * 30, "max_tokens": 5, "ignore_eos": True}
            (choice,), *_ = await answered(session, proxy, COMPLETIONS, body)
            assert choice["finish_reason"] == "length"
        body |= {"prompt": ["first", "second"], "seed": 3}
        assert await answered(session, proxy, COMPLETIONS, body) == await answered(
            session, cluster.url, COMPLETIONS, body
        )
