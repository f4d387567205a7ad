"""Sampling that a client leaves out, on a real 1P1D cluster whose nodes disagree on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from real_cluster import Cluster, running, tiny_model

pytestmark = pytest.mark.cluster

TURNS = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The model is greedy and says 6 tokens; only the decode node was told otherwise."""
    folder = tmp_path_factory.mktemp("defaults")
    flags = tiny_model(folder)
    Path(folder, "tiny", "generation_config.json").write_text(
        '{"temperature": 0.0, "max_new_tokens": 6}'
    )
    wild = {"temperature": 2.0, "repetition_penalty": 2.0, "max_new_tokens": 3}
    with running(
        folder,
        prefill=1,
        decode=1,
        flags=flags,
        decode_flags=["--override-generation-config", json.dumps(wild)],
        router_flags=["--strict-roles"],
    ) as ours:
        yield ours


def answer(url: str, path: str, **body: Any) -> Any:
    told = httpx2.post(
        f"{url}{path}", json={"model": "tiny", "ignore_eos": True, **body}, timeout=60
    )
    assert told.status_code == 200, told.text
    return told.json()


@pytest.mark.parametrize(
    ("path", "asked", "limit"),
    [
        ("/v1/chat/completions", {"messages": TURNS}, {"max_tokens": 6}),
        ("/v1/responses", {"input": "hi"}, {"max_output_tokens": 6}),
    ],
)
def test_both_nodes_use_those_of_the_one_that_drew_the_first_token(
    path: str, asked: dict[str, Any], limit: dict[str, int], cluster: Cluster
) -> None:
    def said(**more: Any) -> tuple[Any, int]:
        told = answer(cluster.url, path, **asked, **more)
        usage = told["usage"]
        text = (
            told.get("choices")
            or told.get("content")
            or [item["content"] for item in told["output"]]
        )
        return text, usage.get("completion_tokens", usage.get("output_tokens"))

    greedy = said(**limit, temperature=0)
    assert greedy[1] == 6
    assert [said(seed=seed) for seed in range(3)] == [greedy] * 3
    assert len({str(said(**limit, seed=seed, temperature=2)) for seed in range(3)}) == 3


def test_a_node_alone_uses_its_own_and_its_limit_cuts_every_answer(cluster: Cluster) -> None:
    (decode,) = cluster.of("decode")
    for more in ({}, {"max_tokens": 50}):
        assert (
            answer(decode.url, "/v1/chat/completions", messages=TURNS, **more)["usage"][
                "completion_tokens"
            ]
            == 3
        )
    assert (decode.health() or {})["sampling_defaults"]["temperature"] == 2.0
