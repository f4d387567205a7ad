"""KV of another node's prefix cache, asked for by real nodes."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from real_cluster import (
    DRAWN,
    Cluster,
    Process,
    attentive_model,
    cached_of,
    complete,
    counted,
    frozen,
    further_router,
    ids,
    rungs,
    running,
    ticket_of,
    tiny_body,
    wait_told,
    wait_until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_lost")]

BLOCK = 16
# A prompt of 100 tokens and an answer of 80, of which the last has no KV.
WHOLE = (100 + 79) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pulls")
    flags = attentive_model(folder, 2048, kv_mib=4)
    with running(
        folder,
        flags=[*flags, "--kv-pull=always", "--transfer-deadline-s=2"],
    ) as ours:
        yield ours


@pytest.fixture
def prefill(cluster: Cluster) -> Process:
    return cluster.of("prefill")[0]


@pytest.fixture
def decode(cluster: Cluster) -> Process:
    return cluster.of("decode")[0]


def asked(node: Process, prompt: list[int], count: int, **fields: Any) -> list[int]:
    fields |= DRAWN | {"max_tokens": count, "return_token_ids": True}
    answer = complete(node.url, prompt, **fields)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def turn_on(node: Process, name: int, **fields: Any) -> list[int]:
    """Have a node answer a prompt; return the next turn's."""
    prompt = ids(name, 100)
    return [*prompt, *asked(node, prompt, 80, **fields), *ids(name + 1, 20)]


def prefilled(node: Process, prompt: list[int], named: dict[str, Any], **fields: Any) -> Any:
    params = {"do_remote_decode": True, "sources": [named]}
    return complete(node.url, prompt, max_tokens=1, kv_transfer_params=params, **DRAWN, **fields)


def failed(node: Process) -> float:
    return node.metric("kvrelay_pulls_failed_total")


def goes_on(decode: Process, prompt: list[int], first: Any, **fields: Any) -> None:
    """The hand-over's answer is that of a node without any cache, and all blocks are free again."""
    mine = asked(decode, prompt, 40, kv_transfer_params=first["kv_transfer_params"], **fields)
    assert mine == asked(decode, prompt, 40, cache_salt=f"nobody else's {prompt}")
    wait_until(lambda: len(set(decode.free_blocks())) == 1, "all blocks are free")


@pytest.mark.parametrize("known", [0, 100], ids=["nothing", "the prompt"])
def test_a_prefill_node_takes_a_whole_turn_from_a_decode_node(
    prefill: Process, decode: Process, known: int
) -> None:
    name = "kvrelay_pulled_tokens_total"
    before, turn = prefill.metric(name), turn_on(decode, known)
    if known:
        asked(prefill, turn[:known], 1)
    first = prefilled(prefill, turn, decode.as_source(WHOLE))
    assert cached_of(first) == WHOLE
    counted([prefill], name, before + WHOLE - known // BLOCK * BLOCK)
    goes_on(decode, turn, first)


def test_a_node_that_computes_a_prompt_itself_takes_it_from_a_prefill_node(
    prefill: Process, decode: Process
) -> None:
    turn = turn_on(prefill, 20)
    two = DRAWN | {"return_token_ids": True, "n": 2}
    params = {"sources": [prefill.as_source(WHOLE)]}
    answer = complete(decode.url, turn, kv_transfer_params=params, **two)
    assert cached_of(answer) == WHOLE
    alone = complete(decode.url, turn, cache_salt="nobody else's", **two)
    assert [each["token_ids"] for each in answer["choices"]] == [
        each["token_ids"] for each in alone["choices"]
    ]


@pytest.mark.parametrize(
    ("name", "theirs", "ours", "found"),
    [(30, "a", "a", WHOLE), (32, "a", "b", 0), (34, "a", None, 0), (36, None, "a", 0)],
)
def test_another_salt_finds_nothing(
    prefill: Process, decode: Process, name: int, theirs: str | None, ours: str | None, found: int
) -> None:
    before, turn = (
        failed(prefill),
        turn_on(decode, name, cache_salt=f"{theirs}{ours}" if theirs else None),
    )
    salt = f"{theirs}{ours}" if theirs == ours else ours
    first = prefilled(prefill, turn, decode.as_source(WHOLE), cache_salt=salt)
    assert cached_of(first) == found
    counted([prefill], "kvrelay_pulls_failed_total", before + (not found))
    goes_on(decode, turn, first, cache_salt=salt)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (40, {"generation": "another"}),
        (41, {"port": 1}),
        (42, {"host": "10.0.0.1"}),
        (43, {"host": "bad host;"}),
        (44, {"tokens": 1 << 40}),
    ],
)
def test_a_wrong_picture_is_computed(
    prefill: Process, decode: Process, name: int, wrong: dict[str, Any]
) -> None:
    turn = ids(name, 200)
    first = prefilled(prefill, turn, decode.as_source(**{"tokens": WHOLE} | wrong))
    assert cached_of(first) == 0
    goes_on(decode, turn, first)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed(
    prefill: Process, decode: Process
) -> None:
    turn, params = turn_on(decode, 60), {"sources": [decode.as_source(WHOLE)]}
    wants = {"echo": True, "logprobs": 1, "max_tokens": 1, "kv_transfer_params": params}
    assert cached_of(complete(prefill.url, turn, **wants)) == 0


def test_the_router_names_the_node_that_has_the_answer_of_the_last_turn(
    cluster: Cluster, decode: Process
) -> None:
    assert cluster.router is not None
    log, turn = cluster.router.log, ids(50, 200)
    fields = DRAWN | {"max_tokens": 60, "return_token_ids": True}
    for at in range(3):
        wait_told(cluster.router)
        answer = complete(cluster.url, turn, **fields)
        known = answer["choices"][0]["token_ids"]
        assert cached_of(answer) == (0 if not at else (len(turn) - 21) // BLOCK * BLOCK)
        alone = complete(cluster.url, turn, cache_salt=f"no cache {at}", **fields)
        assert (cached_of(alone), alone["choices"][0]["token_ids"]) == (0, known)
        turn = [*turn, *known, *ids(51 + at, 20)]
    named = f"pulls from {decode.url.rpartition('/')[2]}"
    wait_until(lambda: named in log.read_text(), "the log line says so")


def test_a_source_that_is_killed_while_it_is_asked_costs_nothing_but_its_kv(
    cluster: Cluster, prefill: Process, decode: Process
) -> None:
    turn, named = turn_on(decode, 70), decode.as_source(WHOLE)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(prefilled(prefill, turn, named)))
    with frozen(decode):
        asking.start()
        wait_until(lambda: prefill.health()["requests"], "the prefill node has it")
        decode.kill_whole()
    asking.join(60)
    assert cached_of(answers[0]) == 0
    cluster.restored(decode)
    goes_on(decode, turn, answers[0])


def test_what_another_node_has_is_found_there_or_its_read_fails(
    cluster: Cluster, prefill: Process, decode: Process
) -> None:
    first, whole = 160, {}
    for name in (200, 201):
        answer = complete(cluster.url, ids(name, first), max_tokens=80, return_token_ids=True)
        said = answer["choices"][0]["token_ids"]
        whole[name] = [*ids(name, first), *said, *ids(name + 1, 20)]
    assert rungs(cluster, ids(203, first)) == {"new": first}
    rest = (first + 79) // BLOCK * BLOCK - first
    new = len(whole[200]) - first - rest
    assert rungs(cluster, whole[200]) == {"gpu": first, "peer": rest, "new": new}
    found: list[dict[str, int]] = []
    late = threading.Thread(target=lambda: found.append(rungs(cluster, whole[201])))
    before = failed(prefill)
    with frozen(decode):
        late.start()
        wait_until(lambda: failed(prefill) > before, "its ask was not answered in time")
    late.join(60)
    assert found == [{"gpu": first, "failed": rest, "new": new}]
    assert prefill.metric("kvrelay_prompt_tokens_total") > 0


def test_what_a_holder_lost_before_the_router_heard_of_it_is_stale(
    cluster: Cluster, prefill: Process, decode: Process
) -> None:
    first, patient = 160, "--health-deadline-s=60"
    with _link(decode.port) as (url, passing):
        peers = ["--strict-roles", f"--prefill={prefill.url}", f"--decode={url}"]
        with further_router(cluster, patient, peers=peers) as router:
            cluster = replace(cluster, router=router)
            cluster.wait_up()
            answer = complete(cluster.url, ids(210, first), max_tokens=80, return_token_ids=True)
            whole = [*ids(210, first), *answer["choices"][0]["token_ids"], *ids(211, 20)]
            rungs(cluster, ids(212, first))
            passing.clear()  # what the decode node tells the router is late
            try:
                reset = httpx2.post(f"{decode.url}/reset_prefix_cache", timeout=60)
                assert reset.status_code == 200
                answer = complete(cluster.url, whole, max_tokens=1, include_metrics=True)
            finally:
                passing.set()
            found = {rung: count for rung, count in answer["kvrelay"]["prompt"].items() if count}
            rest = (first + 79) // BLOCK * BLOCK - first
            assert found == {"gpu": first, "stale": rest, "new": len(whole) - first - rest}
            assert router.metric('kvrelay_router_prompt_tokens_total{rung="stale"}') == rest


@contextmanager
def _link(port: int) -> Iterator[tuple[str, threading.Event]]:
    """Lead connections to a port; what comes back waits until the event is set."""
    passing, always = threading.Event(), threading.Event()
    for event in (passing, always):
        event.set()

    def pump(source: socket.socket, target: socket.socket, may: threading.Event) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                may.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", port)) as node:
                there = threading.Thread(target=pump, args=(self.request, node, always))
                there.start()
                pump(node, self.request, passing)
                there.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", passing
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def failing(cluster: Cluster) -> Process:
    """A further node, which computes no prompt in place of KV that it does not get."""
    node = cluster.start("decode", [*cluster.flags, "--kv-load-failure-policy=fail"])
    cluster.others.append(node)
    cluster.wait_ready(node)
    return node


def take_role(node: Process, role: str) -> None:
    order = httpx2.post(f"{node.url}/admin/role", json={"role": role}, timeout=60)
    assert order.is_success, order.text
    wait_until(lambda: (node.health() or {}).get("role") == role, "it has the role")


@pytest.mark.parametrize(("role", "name"), [("prefill", 80), ("decode", 82)])
def test_a_node_takes_a_whole_turn_from_another_of_its_role(
    cluster: Cluster, decode: Process, failing: Process, role: str, name: int
) -> None:
    take_role(failing, role)
    (source,), tokens = cluster.of(role), "kvrelay_pulled_tokens_total"
    before, turn = failing.metric(tokens), turn_on(source, name)
    named, told = source.as_source(WHOLE), {"include_metrics": True}
    if role == "prefill":
        first = prefilled(failing, turn, named, **told)
        goes_on(decode, turn, first)
    else:
        told |= DRAWN | {"kv_transfer_params": {"sources": [named]}, "return_token_ids": True}
        first = complete(failing.url, turn, **told)
        alone = asked(source, turn, 12, cache_salt="nobody else's")
        assert first["choices"][0]["token_ids"] == alone
    found = {rung: count for rung, count in first["kvrelay"]["prompt"].items() if count}
    assert found == {"peer": WHOLE, "new": len(turn) - WHOLE}
    assert cached_of(first) == WHOLE
    counted([failing], tokens, before + WHOLE)
    wait_until(lambda: len(set(failing.free_blocks())) == 1, "all blocks are free")


def test_a_fetch_that_fails_ends_the_request_and_is_counted(
    cluster: Cluster, prefill: Process, failing: Process
) -> None:
    """Follow, as a third party's proxy does, the ticket of a node that has died since."""
    take_role(failing, "decode")
    short, long = ids(250, 40), ids(251, 500)
    complete(failing.url, short, kv_transfer_params=ticket_of(prefill, short))
    ticket = ticket_of(prefill, long)
    prefill.kill_whole()
    url, follow = f"{failing.url}/v1/completions", tiny_body(long, kv_transfer_params=ticket)
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
    counted([failing], "kvrelay_requests_not_loaded_total", 2)
    counted([failing], "kvrelay_recomputed_prompts_total", 0)
    counted([failing], "kvrelay_fetches_failed_total", 2)
    free, total = failing.free_blocks()
    assert free == total
    cluster.restored(prefill)
