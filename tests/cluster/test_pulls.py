"""KV of another node's prefix cache, asked for by real nodes. The requests name the sources."""

from __future__ import annotations

from typing import Any

import pytest
from real_cluster import (
    SHORT_LEASE,
    Cluster,
    Process,
    complete,
    running,
    tiny_model,
    wait_until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_lost")]

BLOCK = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pulls")
    flags = [*tiny_model(folder, max_position_embeddings=2048, kv_mib=4), *SHORT_LEASE]
    with running(folder, prefill=1, decode=1, flags=[*flags, "--kv-pull", "always"]) as ours:
        yield ours


def ids(name: int, count: int) -> list[int]:
    return [2 + (name * 7919 + at * at * (name + 3)) % 300 for at in range(count)]


def source(node: Process, tokens: int, **changes: Any) -> dict[str, Any]:
    """Name a node as a source, as a router does by its health report."""
    report = node.health()
    assert report is not None
    kv = report["kv"]
    return {"host": kv["address"], **{name: kv[name] for name in ("port", "generation")}} | {
        "tokens": tokens,
        **changes,
    }


def tokens_of(answer: Any) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def asked(node: Process, prompt: list[int], count: int, **fields: Any) -> list[int]:
    return tokens_of(complete(node.url, prompt, max_tokens=count, return_token_ids=True, **fields))


def prefilled(
    node: Process, prompt: list[int], sources: list[dict[str, Any]], **fields: Any
) -> Any:
    """Return the answer of a prefill node whose request names these sources."""
    params = {"do_remote_decode": True, "sources": sources}
    return complete(node.url, prompt, max_tokens=1, kv_transfer_params=params, **fields)


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def pulled(node: Process) -> float:
    return node.metric("kvrelay_pulled_tokens_total")


def gone_within_a_second(node: Process) -> None:
    wait_until(lambda: len(set(node.free_blocks())) == 1, 1, "all blocks are free")


@pytest.mark.parametrize("known", [0, 100], ids=["nothing", "the prompt"])
def test_a_prefill_node_takes_a_whole_turn_from_a_decode_node(cluster: Cluster, known: int) -> None:
    (prefill,), (decode,) = cluster.of("prefill"), cluster.of("decode")
    prompt = ids(known, 100)
    if known:
        asked(prefill, prompt, 1)
    answer = asked(decode, prompt, 80)
    turn = [*prompt, *answer, *ids(9, 20)]
    before, whole = pulled(prefill), (100 + 79) // BLOCK * BLOCK
    first = prefilled(prefill, turn, [source(decode, whole)])
    assert cached(first) == whole
    assert pulled(prefill) - before == whole - known // BLOCK * BLOCK
    follow = first["kv_transfer_params"]
    mine = asked(decode, turn, 40, kv_transfer_params=follow)
    assert mine == asked(decode, turn, 40, cache_salt=f"without a cache {known}")
    gone_within_a_second(decode)
    gone_within_a_second(prefill)
