"""KV that sessions wish to keep, on real nodes behind a router with keys."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import anthropic
import httpx2
import pytest
from real_cluster import (
    Cluster,
    cached_of,
    counted,
    ids,
    running,
    tiny_body,
    tiny_model,
)

pytestmark = pytest.mark.cluster

ASKED, SAID = 100, 48
BLOCKS, WHOLE, MOST = ASKED // 16, (ASKED + SAID - 1) // 16, int(0.4 * 127)
KEYS = "".join(
    f"  - {{name: {name}, sha256: {hashlib.sha256(name.encode()).hexdigest()}, pin-share: 0.4}}\n"
    for name in ("ann", "bob")
)
MARKER = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wishes")
    # 127 blocks a node.
    flags = tiny_model(folder, max_position_embeddings=1024, kv_mib=1)
    flags += ["--kv-pull=always"]
    (folder / "router.yaml").write_text(f"isolate-keys: true\nkeys:\n{KEYS}")
    router_flags = ["--config", str(folder / "router.yaml")]
    with running(folder, flags=flags, router_flags=router_flags) as ours:
        yield ours
        ours.all_blocks_free()


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    for node in nodes.nodes:
        assert httpx2.post(f"{node.url}/reset_prefix_cache", timeout=60).status_code == 200
    counted(nodes.nodes, "kvrelay_blocks_pinned", 0)
    return nodes


Turn = tuple[int, int, list[int]]


def turn(
    cluster: Cluster, key: str, prompt: int | list[int], session: str = "", **fields: Any
) -> Turn:
    """Return the blocks that were cached and that are pinned anew, and the next turn's prompt."""
    if isinstance(prompt, int):
        prompt = ids(prompt, ASKED)
    body = tiny_body(prompt, max_tokens=SAID, return_token_ids=True, **fields)
    headers = {"authorization": f"Bearer {key}", "x-session-id": session}
    answer = httpx2.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    written = told["usage"]["prompt_tokens_details"].get("cache_write_tokens", 0)
    return cached_of(told) // 16, written // 16, [*prompt, *told["choices"][0]["token_ids"], 5, 7]


def flood(cluster: Cluster) -> None:
    """Have all that is not pinned evicted."""
    for name in range(10, 34):
        turn(cluster, "bob", name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_several_prompts_tell_what_is_pinned_of_all(
    cluster: Cluster, *, alone: bool, stream: bool
) -> None:
    prompts = [[2 + (name + at * at) % 300 for at in range(ASKED)] for name in range(3)]
    body = tiny_body(prompts, max_tokens=SAID, stream=stream, **MARKER)
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    url = cluster.nodes[1].url if alone else cluster.url
    headers = {"authorization": "Bearer ann"}
    answer = httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    *_, last = answer.text.removesuffix("data: [DONE]\n\n").split("data: ")
    written = json.loads(last)["usage"]["prompt_tokens_details"]["cache_write_tokens"]
    assert written // 16 == 3 * BLOCKS


def test_turns_that_are_pinned_survive_a_flood_and_another_one_does_not(cluster: Cluster) -> None:
    wishes: list[dict[str, Any]] = [
        MARKER, {"prompt_cache_retention": "24h"}, {"prompt_cache_key": "k"}, {"session": "s"}, {},
    ]  # fmt: skip
    first = [turn(cluster, "ann", name, **wish) for name, wish in enumerate(wishes)]
    assert [written for _, written, _ in first] == [BLOCKS] * 4 + [0]
    flood(cluster)
    cached = [
        turn(cluster, "ann", prompt, **wish)[0]
        for (_, _, prompt), wish in zip(first, wishes, strict=True)
    ]
    assert cached == [WHOLE] * 4 + [0]  # with the answers, which only the decode node had
    assert turn(cluster, "bob", first[0][2], **MARKER)[0] == 0


def test_the_budget_of_a_key_holds_and_what_is_beyond_it_is_no_error(cluster: Cluster) -> None:
    first = [turn(cluster, "ann", name, **MARKER) for name in range(10)]
    # On the prefill node prompts alone, on the decode node answers, too.
    for node, refused in zip(cluster.nodes, (2, 5), strict=True):
        assert node.metric("kvrelay_blocks_pinned") == MOST
        assert node.metric("kvrelay_pins_refused_total") == refused
    flood(cluster)
    assert [turn(cluster, "ann", first[at][2])[0] for at in (0, 9)] == [WHOLE, 0]
    # The node may pin half of its blocks.
    more = [turn(cluster, "bob", name, **MARKER)[1] for name in (50, 51, 52)]
    assert more[::2] == [BLOCKS, 0]


def test_a_message_says_what_its_markers_have_put_into_the_cache(cluster: Cluster) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Be brief. " * 20, **MARKER}],
        "messages": [{"role": "user", "content": "hi"}],
        "extra_body": {"seed": 5, "ignore_eos": True},
    }
    with anthropic.Anthropic(base_url=cluster.url, api_key="ann", max_retries=0) as client:
        first = client.messages.create(**asked).usage
        with client.messages.stream(**asked) as stream:
            again = stream.get_final_message().usage
        asked["system"] *= 5
        with pytest.raises(anthropic.BadRequestError, match="5 cache_control markers"):
            client.messages.create(**asked)
    kept = first.cache_creation_input_tokens
    assert kept
    assert (first.cache_read_input_tokens, again.cache_read_input_tokens) == (0, kept)
    assert (first.input_tokens, 0) == (again.input_tokens, again.cache_creation_input_tokens)
