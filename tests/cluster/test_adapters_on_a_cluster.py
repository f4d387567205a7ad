"""LoRA adapters through real processes: hand-over equal to one node, run-time load and unload,
content that differs.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import (
    Cluster,
    Process,
    complete,
    counted,
    running,
    tiny_model,
    wait_until,
)

from tests.paged_engine.tiny_adapters import make_adapter

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_lost")]

PROMPT = [2 + (i * i) % 300 for i in range(70)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    tiny_model(folder)
    return {
        name: make_adapter(folder / name, folder / "tiny", seed=seed)
        for seed, name in enumerate(("one", "two", "three", "four"))
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, adapters):
    folder = tmp_path_factory.mktemp("cluster")
    flags = tiny_model(folder, kv_mib=4)
    flags += ["--enable-lora", "--max-loras=3", "--allow-runtime-lora"]
    flags += ["--max-num-batched-tokens=16"]
    flags += [f"--lora-modules={name}={adapters[name]}" for name in ("one", "two")]
    with running(folder, flags=flags) as ours:
        alone = ours.start("serve", flags)
        ours.nodes.append(alone)
        ours.wait_ready(alone)
        yield ours


def post(url: str, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(f"{url}{path}", json=body, timeout=120)


def answer(url: str, model: str, **fields: Any) -> dict[str, Any]:
    return complete(url, PROMPT, model=model, **{"logprobs": 1} | fields)


def said(got: dict[str, Any]) -> tuple[str, list[float]]:
    return got["choices"][0]["text"], got["choices"][0]["logprobs"]["token_logprobs"]


def models(url: str) -> list[tuple[str, str | None]]:
    cards = httpx2.get(f"{url}/v1/models", timeout=60).json()["data"]
    return [(card["id"], card.get("parent")) for card in cards]


def load(url: str, name: str, path: Path, **fields: Any) -> httpx2.Response:
    return post(url, "/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **fields)


def unload(url: str, name: str) -> httpx2.Response:
    return post(url, "/v1/unload_lora_adapter", lora_name=name)


def of(cluster: Cluster, role: str) -> Process:
    (node,) = cluster.of(role)
    return node


def test_a_hand_over_gives_what_one_node_gives(cluster):
    alone = of(cluster, "serve").url
    answers = {}
    for name in ("tiny", "one", "two"):
        got = answer(cluster.url, name)
        assert got["model"] == name
        answers[name] = said(got)
        assert said(answer(alone, name)) == answers[name]
        again = answer(cluster.url, name)  # with the prefix cached on both nodes
        assert said(again) == answers[name]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    several = {"n": 2, "temperature": 0.9, "seed": 4, "model": "two"}
    choices = [
        [c["text"] for c in answer(url, **several)["choices"]] for url in (cluster.url, alone)
    ]
    assert choices[0] == choices[1]
    assert choices[0][0] != choices[0][1]
    assert len({tuple(logprobs) for _, logprobs in answers.values()}) == 3
    counted([of(cluster, "decode")], "kvrelay_fetches_failed_total", 0)
    assert of(cluster, "decode").metric("kvrelay_fetches_total") >= 3


def test_loaded_and_unloaded_through_the_router_while_requests_run(cluster, adapters):
    stop, broken = threading.Event(), []
    wanted = said(answer(cluster.url, "one"))

    def busy() -> None:
        while not stop.is_set():
            if said(answer(cluster.url, "one")) != wanted:
                broken.append("an answer of another adapter has changed")

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    try:
        for _ in range(2):
            got = load(cluster.url, "three", adapters["three"])
            assert got.status_code == 200, got.text
            assert [node["status"] for node in got.json()["nodes"]] == [200, 200]
            assert ("three", "tiny") in models(cluster.url)
            mine = said(answer(cluster.url, "three"))
            assert mine != wanted
            assert load(cluster.url, "three", adapters["three"]).status_code == 400
            got = load(cluster.url, "three", adapters["four"], load_inplace=True)
            assert got.status_code == 200, got.text
            assert said(answer(cluster.url, "three")) not in (mine, wanted)
            assert unload(cluster.url, "three").status_code == 200
            gone = post(cluster.url, "/v1/completions", model="three", prompt="x", max_tokens=1)
            assert gone.status_code == 404
    finally:
        stop.set()
        thread.join(60)
    assert not broken


def test_kv_of_another_content_is_not_taken(cluster, adapters):
    prefill, decode = of(cluster, "prefill"), of(cluster, "decode")
    before = decode.metric("kvrelay_fetches_failed_total")
    assert load(prefill.url, "mixed", adapters["three"]).status_code == 200
    none = wait_until(
        lambda: (
            (
                got := post(cluster.url, "/v1/completions", model="mixed", prompt="x", max_tokens=2)
            ).status_code
            == 503
            and got
        ),
        "the router knows the adapter on one node",
    )
    assert "decode node" in none.json()["error"]["message"]
    assert load(decode.url, "mixed", adapters["four"]).status_code == 200
    wait_until(
        lambda: "mixed" in str(httpx2.get(f"{cluster.url}/health", timeout=60).json()["nodes"][1]),
        "known",
    )
    got = answer(cluster.url, "mixed", logprobs=None)
    assert got["usage"]["completion_tokens"] == 12
    counted([decode], "kvrelay_fetches_failed_total", before + 1)
    assert "KV was made with adapter 'mixed' of content" in decode.log.read_text()
    for node in (prefill, decode):
        assert unload(node.url, "mixed").status_code == 200
