"""`kvrelay doctor` on real clusters: what it finds, and that nothing stays taken, whoever dies in
the middle.
"""

import json
import os
import signal
import subprocess

import httpx2
import pytest
import real_cluster
from real_cluster import Process, children, running, tiny_model, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.alone,
    pytest.mark.usefixtures("nothing_is_lost"),
]

KEY = "node-key"
LEASE_S = 2.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A prefill node, and two decode nodes of which the second may use NIXL alone."""
    folder = tmp_path_factory.mktemp("doctor")
    flags = tiny_model(folder)
    flags += ["--lease-s", str(LEASE_S), "--heartbeat-s", "0.3", "--api-key", KEY]
    flags += ["--transfer-deadline-s", "1"]
    with running(
        folder, prefill=1, decode=1, flags=flags, router_flags=["--node-api-key", KEY]
    ) as ours:
        forced = ours.start("decode", [*flags, "--kv-connector", "nixl"])
        ours.nodes.append(forced)
        ours.wait_ready(forced)
        yield ours


def doctor(*arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return real_cluster.doctor(*arguments, KVRELAY_NODE_API_KEY=key)


def ask(node: Process, what: str, content: object, key: str = KEY) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(
        f"{node.url}/kv/probe/{what}",
        content=json.dumps(content).encode(),
        headers=headers,
        timeout=30,
    )


def fetch(node: Process, offered: dict, **changes: object) -> dict:
    """Have a node fetch an offered probe, with another ticket or seed."""
    content = {"ticket": offered["ticket"], "seed": offered["seed"]} | changes
    return ask(node, "fetch", content).json()


def offer(node: Process, blocks: int) -> dict:
    """An offered probe; what another test left behind has ended before."""

    def offered() -> dict | None:
        answer = ask(node, "offer", {"blocks": blocks}).json()
        return answer if answer["type"] == "ProbeOffered" else None

    return wait_until(offered, LEASE_S + 2, "a probe is offered")


def test_every_pair_of_a_router_is_measured_and_verified(cluster):
    done = doctor("--router", cluster.url, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["failures"], report["healthy"]) == (0, [], True), done.stderr
    found = {(pair["prefill"], pair["decode"]): pair["plane"] for pair in report["pairs"]}
    assert found == {("prefill-0", "decode-0"): "direct"}
    for pair in report["pairs"]:
        assert [sample["blocks"] for sample in pair["samples"]] == [1, 8, 64]
        assert all(sample["verified"] and sample["gb_s"] > 0 for sample in pair["samples"])


def test_a_pair_on_a_slow_path_is_named_in_words(cluster):
    prefill, (_, forced) = cluster.of("prefill")[0], cluster.of("decode")
    done = doctor("--prefill", prefill.url, "--decode", forced.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill-0 -> decode-0: handshake ok, nixl, one host" in done.stdout
    assert "although the two share a host and could use direct" in done.stdout
    assert "verified" in done.stdout


def test_a_node_that_is_down_and_a_wrong_key_are_failures(cluster):
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    done = doctor(
        "--prefill", prefill.url, "--prefill", "http://127.0.0.1:9", "--decode", decode.url
    )
    assert done.returncode == 1
    assert "failure: prefill-1 (http://127.0.0.1:9): " in done.stdout
    assert "prefill-0 -> decode-0: handshake ok" in done.stdout
    done = doctor("--prefill", prefill.url, "--decode", decode.url, key="wrong")
    assert done.returncode == 1
    assert "prefill-0 wants the nodes' key" in done.stdout


def test_a_doctor_that_dies_between_offer_and_fetch_takes_nothing_for_longer_than_a_lease(cluster):
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    expired = prefill.metric("kvrelay_leases_expired_total")
    offered = offer(prefill, 8)
    busy = ask(prefill, "offer", {"blocks": 1}).json()
    assert (busy["type"], busy["busy"]) == ("ProbeRefused", True)
    wait_until(
        lambda: prefill.metric("kvrelay_leases_expired_total") > expired,
        LEASE_S + 2,
        "its lease ends",
    )
    cluster.all_blocks_free(within_s=1)
    late = fetch(decode, offered)
    assert late["type"] == "ProbeRefused"
    assert late["reason"].startswith("LeaseLost: ")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"signature": "00"}, "the ticket was altered"),
        ({"growing": True}, "not one that a node has offered as a probe"),
    ],
)
def test_forged_tickets_are_refused(cluster, change, said):
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    offered = offer(prefill, 2)
    answer = fetch(decode, offered, ticket=offered["ticket"] | change)
    assert answer["type"] == "ProbeRefused"
    assert said in answer["reason"]
    release = {"request_ids": [offered["ticket"]["remote_request_id"]]}
    headers = {"authorization": f"Bearer {KEY}"}
    httpx2.post(
        f"{prefill.url}/kv/release",
        content=json.dumps(release).encode(),
        headers=headers,
        timeout=5,
    )


def test_bad_asks_are_refused(cluster):
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    assert ask(prefill, "offer", {"blocks": 1}, key="wrong").status_code == 401
    assert ask(prefill, "offer", {"blocks": "x"}).status_code == 400
    assert ask(prefill, "offer", {"blocks": 1 << 70}).status_code == 400
    for ticket, seed in (({"remote_port": 1 << 40}, 1), ({"remote_port": 9}, 1 << 70)):
        assert ask(decode, "fetch", {"ticket": ticket, "seed": seed}).status_code == 400
    assert ask(decode, "offer", {"blocks": 1}).status_code == 400
    assert ask(prefill, "fetch", {"ticket": {}, "seed": 1}).status_code == 400
    for blocks in (0, -1, 1 << 40, prefill.free_blocks()[1] // 2 + 1):
        refused = ask(prefill, "offer", {"blocks": blocks}).json()
        assert refused["type"] == "ProbeRefused", blocks
        assert "can spare" in refused["reason"]


def test_a_prefill_node_that_stands_still_costs_the_decode_node_a_deadline(cluster):
    """Nothing of it is in flight yet, so its blocks are free at once; the stopped one's when it
    goes on.
    """
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    offered = offer(prefill, 8)
    (engine,) = children(prefill.popen.pid, b"kvrelay.node.engine_process")
    os.kill(engine, signal.SIGSTOP)
    try:
        answer = fetch(decode, offered)
        if answer["type"] == "ProbeFetched":  # its blocks and leases can be read without it
            assert answer["verified"]
        else:
            assert answer["reason"].startswith(("TransferTimeout: ", "PeerLost: "))
        wait_until(lambda: len(set(decode.free_blocks())) == 1, 1, "its blocks are free at once")
    finally:
        os.kill(engine, signal.SIGCONT)
    cluster.all_blocks_free(within_s=LEASE_S + 1)
    fresh = offer(prefill, 8)
    assert fetch(decode, fresh)["verified"]
