"""A decode node whose operator wants an error and no prompt computed where it should not be, as real
processes.
"""

from __future__ import annotations

import json

import httpx2
import pytest
from real_cluster import (
    SHORT_LEASE,
    Cluster,
    complete,
    counted,
    running,
    ticket_of,
    tiny_body,
    tiny_model,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_lost")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    flags = tiny_model(folder, max_position_embeddings=8192, kv_mib=16)
    flags += ["--max-num-batched-tokens", "16"]
    flags += [*SHORT_LEASE, "--kv-load-failure-policy", "fail"]
    with running(folder, prefill=1, decode=1, flags=flags) as ours:
        yield ours


def test_a_fetch_that_fails_ends_the_request_and_is_counted(cluster: Cluster) -> None:
    complete(cluster.url, [5] * 40)
    # As a third party's proxy: a ticket of a node that dies before it is followed.
    (prefill,), decodes = cluster.of("prefill"), cluster.of("decode")
    long = [7] * 500
    ticket = ticket_of(prefill, long)
    prefill.kill_whole()
    url, follow = f"{decodes[0].url}/v1/completions", tiny_body(long, kv_transfer_params=ticket)
    answer = httpx2.post(url, json=follow, timeout=60)
    assert answer.status_code == 502
    error = answer.json()["error"]
    assert error["code"] == "kv_not_loaded"
    assert "is gone or was restarted (PeerLost)" in error["message"]
    assert "127.0.0.1" not in error["message"]
    # A stream has begun with the first token, which came with the ticket.
    answer = httpx2.post(url, json=follow | {"stream": True}, timeout=60)
    *_, last, done = (line for line in answer.text.splitlines() if line)
    assert (answer.status_code, done) == (200, "data: [DONE]")
    assert json.loads(last.removeprefix("data: "))["error"] == error
    counted([decodes[0]], "kvrelay_requests_not_loaded_total", 2)
    counted([decodes[0]], "kvrelay_recomputed_prompts_total", 0)
    counted([decodes[0]], "kvrelay_fetches_failed_total", 2)
    cluster.all_blocks_free()
    cluster.restored(prefill)
