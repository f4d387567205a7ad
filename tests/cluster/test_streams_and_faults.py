"""Streams and faults on real processes with a tiny random model.

Input is bad, and some requests kill each node that they reach.
"""

import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from real_cluster import (
    Cluster,
    Process,
    complete,
    counted,
    running,
    text_of,
    ticket_of,
    tiny_body,
    tiny_model,
    wait_until,
)

from kvrelay.kv_transfer.tickets import signed
from kvrelay.wire.transfer import KvTransferParams

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.usefixtures("nothing_is_lost"),
]

REFUSED_S = 8.0
STREAMS = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    flags = tiny_model(folder)
    fault = Path(__file__).parent / "poison_fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(fault), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("POISON_FAULT", str(folder / "fault"))
        patch.setenv("POISON_REFUSED_S", str(REFUSED_S))
        # Streams on each node, whatever the busy machine has made of its card.
        even = ["--decode-policy=least_queue"]
        with running(folder, prefill=2, decode=2, flags=flags, router_flags=even) as ours:
            yield ours


def post(url: str, content: bytes | dict, path: str = "/v1/completions") -> httpx2.Response:
    data = content if isinstance(content, bytes) else msgspec.json.encode(content)
    headers = {"content-type": "application/json"}
    return httpx2.post(url + path, content=data, headers=headers, timeout=60)


def _ticket(**changes) -> dict:
    given = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r"}
    given |= {"remote_host": "127.0.0.1", "remote_port": 9, "generation": "g", "num_tokens": 20}
    given |= {"remote_block_ids": [[1, 2]], "prompt_token_ids": [5] * 20, "generated": [7]}
    return given | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": [[1]]},
        {"remote_block_ids": [[1, 2**70]]},
        {"remote_port": 2**40},
        {"generated": [1_000_000]},
        {"prompt_token_ids": [5] * 19},
    ],
)
def test_a_forged_ticket_is_a_400_and_hurts_nobody(cluster, changes):
    decode = cluster.of("decode")[0]
    answer = post(decode.url, tiny_body("", kv_transfer_params=_ticket(**changes)))
    assert answer.status_code == 400, answer.text
    assert decode.health() is not None


def test_an_answer_that_another_node_began_goes_on_in_its_grammar_or_is_a_400(cluster):
    """After the death of a decode node nobody else knows what comes next."""
    decode, fields = cluster.of("decode")[0], {"structured_outputs": {"choice": ["yes and no"]}}
    params = {"do_remote_prefill": True, "prompt_token_ids": [5] * 20, "seed": 4}
    for said in ("", "y", "yes and", "yes and no", "no"):
        given = params | {"generated": [*said.encode()]}
        body = tiny_body("", max_tokens=40, ignore_eos=False, kv_transfer_params=given, **fields)
        answer = post(decode.url, body)
        if said == "no":
            assert answer.status_code == 400
            assert "does not match its grammar" in answer.json()["error"]["message"]
        else:
            (choice,) = answer.json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("yes and no", "stop")


def _signed(ticket: dict, secret: str, at: float) -> Any:
    """Return the ticket as a node that has this secret would give it away."""
    params = signed(msgspec.convert(ticket, KvTransferParams), secret, at)
    return msgspec.json.decode(msgspec.json.encode(params))


def test_a_ticket_that_no_node_of_the_cluster_signed_is_computed_here_and_never_dialled(cluster):
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    ticket = ticket_of(prefill, "d" * 50)
    assert ticket["seed"] < 2**53  # a proxy may read numbers as floats
    whole = text_of(complete(decode.url, "d" * 50))
    failed = decode.metric("kvrelay_fetches_failed_total")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        moved = ticket | {"remote_port": stranger.getsockname()[1]}
        forged = {
            "altered, or signed with another": moved,
            "is not signed": {name: value for name, value in moved.items() if name != "signature"},
            "the ticket expired": _signed(moved, cluster.secret, time.time() - 3600),
        }
        for reason, params in forged.items():
            # Another salt each time: what is cached here would not be fetched.
            answer = complete(decode.url, "d" * 50, kv_transfer_params=params, cache_salt=reason)
            assert text_of(answer) == whole
            wait_until(lambda: reason in decode.log.read_text(), f"the log says: {reason}")  # noqa: B023
        counted([decode], "kvrelay_fetches_failed_total", failed + len(forged))
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.accept()
    complete(decode.url, "d" * 50, max_tokens=1, kv_transfer_params=ticket)  # gives it back


def test_the_secret_is_shown_nowhere(cluster):
    for process in (*cluster.nodes, cluster.router):
        assert cluster.secret not in process.log.read_text()
        for path in ("metrics", "health"):
            assert cluster.secret not in httpx2.get(f"{process.url}/{path}", timeout=60).text
    for pid in [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        try:
            assert cluster.secret.encode() not in (pid / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended


def test_a_ticket_that_is_not_needed_is_given_back_at_once(cluster):
    """Behind a third-party proxy the first token may be the last; no lease has to end for it."""
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    ticket = ticket_of(prefill, "c" * 50)
    expired = prefill.metric("kvrelay_leases_expired_total")
    answer = complete(decode.url, "", max_tokens=1, kv_transfer_params=ticket)
    assert text_of(answer) == text_of(complete(prefill.url, "c" * 50, max_tokens=1))
    cluster.all_blocks_free()
    counted([prefill], "kvrelay_leases_expired_total", expired)


def test_a_body_of_300_000_keys_is_refused_by_the_router_and_by_every_node_before_it_is_read(
    cluster,
):
    schema = dict.fromkeys(map(str, range(300_000)), 1)
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for url in (cluster.url, *(node.url for node in cluster.nodes)):
        answer = post(url, tiny_body(response_format=wanted))
        assert answer.status_code == 400
        assert "keys and texts" in answer.json()["error"]["message"]


def ask(cluster: Cluster, user: str, **fields: Any) -> httpx2.Response:
    body = tiny_body("x" * 60, user=user, **{"max_tokens": 4} | fields)
    return httpx2.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def dead(cluster: Cluster) -> list[Process]:
    return [node for node in cluster.nodes if node.popen.poll() is not None]


def outcome(cluster: Cluster, name: str) -> float:
    text = httpx2.get(f"{cluster.url}/metrics", timeout=60).text
    found = re.search(rf'poison_requests_total{{outcome="{name}"}} (\S+)', text)
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize("what", ["kill-http", "kill-engine"])
def test_two_nodes_die_of_it_and_then_it_reaches_none_for_a_while(
    cluster: Cluster, what: str
) -> None:
    fault, stopped, refused = (
        cluster.folder / "fault",
        outcome(cluster, "stopped"),
        outcome(cluster, "refused"),
    )
    fault.touch()
    texts = [""] * STREAMS

    def follow(at: int) -> None:
        body = tiny_body("x" * 60, user=f"{at}", stream=True, max_tokens=300)
        url = f"{cluster.url}/v1/completions"
        with httpx2.stream("POST", url, json=body, timeout=60) as answer:
            for part in answer.iter_text():
                texts[at] += part

    streams = [threading.Thread(target=follow, args=(at,), daemon=True) for at in range(STREAMS)]
    for stream in streams:
        stream.start()
    # One that still waits for its prompt may lose both nodes, too, and be taken for the cause.
    wait_until(lambda: all('"text"' in text for text in texts), "the streams run")
    answer = ask(cluster, what)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "poison_request")
    again = ask(cluster, what)
    assert (again.status_code, again.json()["error"]["code"]) == (503, "poison_request")
    assert 1 <= int(again.headers["retry-after"]) <= REFUSED_S
    wait_until(lambda: len(dead(cluster)) == 2, "the processes of both nodes have ended")
    assert ask(cluster, "another").status_code == 200
    for stream in streams:
        stream.join(60)
    for text in texts:
        assert text.endswith("data: [DONE]\n\n"), text
        assert '"finish_reason":"length"' in text, text
    assert len(dead(cluster)) == 2
    assert (outcome(cluster, "stopped"), outcome(cluster, "refused")) == (stopped + 1, refused + 1)
    cluster.wait_ready(*map(cluster.restart, dead(cluster)))
    fault.unlink()  # its cause is mended
    wait_until(lambda: ask(cluster, what).status_code == 200, "it may come again", interval_s=0.5)
    assert dead(cluster) == []
