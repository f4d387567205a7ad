"""Real processes, real sockets, a tiny random model: streams, disconnects, killed nodes, bad input."""

import asyncio
import json
import random
import signal
import socket
import time
from pathlib import Path

import aiohttp
import httpx2
import msgspec
import openai
import pytest
from real_cluster import Cluster, counted, running, tiny_model, wait_until

from kvrelay.kv_transfer.tickets import signed
from kvrelay.router.nodes.node import HealthReport
from kvrelay.wire.outputs import Load
from kvrelay.wire.transfer import KvTransferParams

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

KEY = "test-key"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    flags = tiny_model(folder)
    flags += [
        "--served-model-name",
        "tiny",
        "--kv-cache-memory-bytes",
        str(8 << 20),
        "--lease-s",
        "1.5",
        "--heartbeat-s",
        "0.3",
    ]
    with running(folder, prefill=2, decode=2, flags=flags, router_flags=["--api-key", KEY]) as ours:
        yield ours


@pytest.fixture(autouse=True)
def nothing_is_lost(cluster: Cluster):
    """After every test all blocks of all nodes are free."""
    yield
    cluster.all_blocks_free(within_s=15)


def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def body(prompt: str = "hello", **fields) -> dict:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    } | fields


def post(
    cluster: Cluster, content: bytes | dict, path: str = "/v1/completions", key: str = KEY
) -> httpx2.Response:
    data = json.dumps(content).encode() if isinstance(content, dict) else content
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx2.post(cluster.url + path, content=data, headers=headers, timeout=60)


def test_streamed_and_whole_answers_are_equal_and_were_handed_over(cluster):
    before = sum(node.metric("kvrelay_fetches_total") for node in cluster.of("decode"))
    whole = client(cluster).completions.create(
        **{k: v for k, v in body("a" * 200).items() if k != "ignore_eos"},
        extra_body={"ignore_eos": True},
    )
    chunks = list(client(cluster).completions.create(
        model="tiny", prompt="a" * 200, max_tokens=12, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ))  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert chunks[-1].choices[0].finish_reason == "length"
    counted(cluster.of("decode"), "kvrelay_fetches_total", before + 2)
    counted(cluster.of("decode"), "kvrelay_fetches_failed_total", 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_third_party_proxy_can_drive_the_nodes(cluster, stream):
    """The contract of the field, sequential: prefill with max_tokens 1, then decode with what it
    answered.
    """
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = httpx2.post(
        f"{prefill.url}/v1/completions", json=body("b" * 50, max_tokens=1, kv_transfer_params=asked)
    )
    given = first.json()["kv_transfer_params"]
    assert given["do_remote_prefill"] is True
    assert given["remote_block_ids"] == [given["remote_block_ids"][0]]
    before = decode.metric("kvrelay_fetches_total")
    second = httpx2.post(
        f"{decode.url}/v1/completions", json=body("b" * 50, kv_transfer_params=given, stream=stream)
    )
    whole = httpx2.post(f"{decode.url}/v1/completions", json=body("b" * 50)).json()["choices"][0][
        "text"
    ]
    if stream:
        events = [line[6:] for line in second.text.splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    else:
        text = second.json()["choices"][0]["text"]
    assert text == whole
    assert whole.startswith(first.json()["choices"][0]["text"])
    counted([decode], "kvrelay_fetches_total", before + 1)


def test_a_node_announces_what_it_costs_and_counts_its_legs(cluster):
    decode = cluster.of("decode")[0]

    def report() -> HealthReport:
        return msgspec.json.decode(
            httpx2.get(f"{decode.url}/health", timeout=5).content, type=HealthReport
        )

    told = report()
    assert told.costs is not None
    assert min(told.costs.step, told.max_gap_ms, told.load.pace, told.load.spill_ms) > 0
    wishes = {"spill": True, "tpot_ms": 50.0, "expected_output": 12}
    answer = httpx2.post(
        f"{decode.url}/v1/completions", json=body("spilled", n=2, kv_transfer_params=wishes)
    )
    number = Load.parse(answer.headers["x-kvrelay-load"]).leg
    assert number >= told.load.legs + 2
    wait_until(lambda: report().load.legs >= number, 5, "the engine has counted the leg")
    assert (report().load.row_weight, report().load.promised_tokens) == (0, 0)
    assert report().load.token_rate > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_node_tells_the_stages_that_it_has_to_who_asks_it_itself(cluster, stream):
    """Also if a stop string ends the request, of which the engine does not hear in time."""
    decode = cluster.of("decode")[0]
    wish = body("stages", include_metrics=True, stream=stream)

    def stages(**fields) -> set[str]:
        text = httpx2.post(f"{decode.url}/v1/completions", json=wish | fields).text
        last = text.split("\n\n")[-3].removeprefix("data: ") if stream else text
        return set(json.loads(last)["kvrelay"])

    assert stages() == {"queue_ms", "prefill_ms", "first_step_ms", "decode_ms", "total_ms"}
    assert stages(max_tokens=1) == {"queue_ms", "prefill_ms", "total_ms"}
    text = httpx2.post(f"{decode.url}/v1/completions", json=body("stages")).json()["choices"][0][
        "text"
    ]
    assert {"queue_ms", "prefill_ms", "total_ms"} <= stages(stop=text[len(text) // 2 :])


def test_one_token_never_reaches_a_decode_node(cluster):
    before = sum(node.metric("kvrelay_fetches_total") for node in cluster.of("decode"))
    answer = post(cluster, body(max_tokens=1)).json()
    assert answer["usage"]["completion_tokens"] == 1
    counted(cluster.of("decode"), "kvrelay_fetches_total", before)


def test_chat_streams_through_the_official_client(cluster):
    stream = client(cluster).chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
    ] == ["length"]


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b'{"model": "tiny", ', 400, "JSON"),
        (b"[1]", 400, ""),
        (body(model="other"), 404, "other"),
        (body("x" * 3000), 400, "1024"),
        (body(max_tokens=5000), 400, "1024"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(top_p=0), 400, "top_p"),
        (body(n=0), 400, "n"),
        (body(temperature=-1), 400, "temperature"),
        (body(logprobs=21), 400, "logprobs"),
        (body(stream_options={"include_usage": True}), 400, "stream_options"),
        (
            body(kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.0.0.1"}),
            400,
            "kv_transfer_params",
        ),
        (body(suffix="x"), 400, "suffix"),
        (body(repetition_penalty=1e-300), 400, "repetition_penalty"),
        (body(stop_token_ids=list(range(320)) * 4, min_tokens=2), 400, "stop_token_ids"),
        (body(logit_bias={"9" * 400: 1}), 400, "logit_bias"),
        (body(min_tokens=20, max_tokens=None), 400, "min_tokens"),
    ],
)
def test_bad_input_is_a_clear_4xx(cluster, content, status, word):
    answer = post(cluster, content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert word in error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")


def _ticket(**changes) -> dict:
    given = {
        "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 9, "generation": "g", "num_tokens": 20, "remote_block_ids": [[1, 2]],
        "prompt_token_ids": [5] * 20, "generated": [7],
    }  # fmt: skip
    return given | changes


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": [[1]]},
        {"remote_block_ids": [[1, 2], [3, 4]]},
        {"remote_block_ids": [[1, 2**70]]},
        {"remote_port": 2**40},
        {"generated": [1_000_000]},
        {"generated": [-1]},
        {"prompt_token_ids": [5] * 19},
        {"do_remote_decode": True},
    ],
)
def test_a_forged_ticket_is_a_400_and_hurts_nobody(cluster, changes):
    decode = cluster.of("decode")[0]
    answer = httpx2.post(
        f"{decode.url}/v1/completions",
        json=body("", kv_transfer_params=_ticket(**changes)),
        timeout=30,
    )
    assert answer.status_code == 400, answer.text
    assert decode.health() is not None


def _signed(ticket: dict, secret: str, at: float) -> dict:
    """As a node that has this secret would give it away."""
    return json.loads(
        msgspec.json.encode(signed(msgspec.convert(ticket, KvTransferParams), secret, at))
    )


def test_a_signed_ticket_to_nowhere_is_computed_here(cluster):
    decode = cluster.of("decode")[0]
    failed = decode.metric("kvrelay_fetches_failed_total")
    ticket = _signed(_ticket(), cluster.secret, time.time())
    answer = httpx2.post(
        f"{decode.url}/v1/completions", json=body("", kv_transfer_params=ticket), timeout=30
    )
    assert answer.json()["usage"]["completion_tokens"] == 12
    counted([decode], "kvrelay_fetches_failed_total", failed + 1)
    assert decode.metric("kvrelay_recomputed_prompts_total") >= 1
    assert "PeerLost: the connection to 127.0.0.1:9 " in decode.log.read_text()


def test_a_ticket_that_no_node_of_the_cluster_signed_is_computed_here_and_never_dialled(cluster):
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = httpx2.post(
        f"{prefill.url}/v1/completions", json=body("d" * 50, max_tokens=1, kv_transfer_params=asked)
    )
    given = first.json()["kv_transfer_params"]
    whole = httpx2.post(f"{decode.url}/v1/completions", json=body("d" * 50)).json()["choices"][0][
        "text"
    ]
    failed = decode.metric("kvrelay_fetches_failed_total")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        moved = given | {"remote_port": stranger.getsockname()[1]}
        forged = {
            "altered, or signed with another": moved,
            "is not signed": {name: value for name, value in moved.items() if name != "signature"},
            "the ticket expired": _signed(moved, cluster.secret, time.time() - 3600),
        }
        for reason, ticket in forged.items():
            # Another salt each time: what is cached here would not be fetched.
            answer = httpx2.post(
                f"{decode.url}/v1/completions",
                json=body("d" * 50, kv_transfer_params=ticket, cache_salt=reason),
                timeout=30,
            )
            assert answer.json()["choices"][0]["text"] == whole
            assert reason in decode.log.read_text()
        counted([decode], "kvrelay_fetches_failed_total", failed + len(forged))
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.accept()


def test_the_secret_is_shown_nowhere(cluster):
    everything = [*cluster.nodes, cluster.router]
    for process in everything:
        assert cluster.secret not in process.log.read_text()
        assert cluster.secret not in httpx2.get(f"{process.url}/metrics", timeout=5).text
        assert cluster.secret not in httpx2.get(f"{process.url}/health", timeout=5).text
    for pid in [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        try:
            assert cluster.secret.encode() not in (pid / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended


def test_a_ticket_that_is_not_needed_is_given_back_at_once(cluster):
    """Behind a third-party proxy the first token may be the last: the prefill node does not wait
    for its lease.
    """
    prefill, decode = cluster.of("prefill")[0], cluster.of("decode")[0]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    first = httpx2.post(
        f"{prefill.url}/v1/completions", json=body("c" * 50, max_tokens=1, kv_transfer_params=asked)
    )
    given = first.json()["kv_transfer_params"]
    expired = prefill.metric("kvrelay_leases_expired_total")
    answer = httpx2.post(
        f"{decode.url}/v1/completions", json=body("", max_tokens=1, kv_transfer_params=given)
    )
    assert answer.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
    cluster.all_blocks_free(within_s=1.0)
    counted([prefill], "kvrelay_leases_expired_total", expired)


def test_a_wrong_key_is_401_and_an_unknown_route_404(cluster):
    assert post(cluster, body(), key="wrong").status_code == 401
    assert post(cluster, body(), path="/v1/embeddings").status_code == 404
    assert post(cluster, body(), path="/v1/embeddings").json()["error"]["message"]


def test_a_body_of_100_mb_is_413_and_is_not_read_whole(cluster):
    answer = post(cluster, b'{"model": "tiny", "prompt": "' + b"x" * 100_000_000 + b'"}')
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_of_300_000_keys_is_refused_by_the_router_and_by_every_node_before_it_is_read(
    cluster,
):
    schema = dict.fromkeys(map(str, range(300_000)), 1)
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    crowded = body(response_format=wanted)
    answers = [post(cluster, crowded)]
    answers += [
        httpx2.post(f"{node.url}/v1/completions", json=crowded, timeout=30)
        for node in cluster.nodes
    ]
    for answer in answers:
        assert answer.status_code == 400
        assert "keys and texts" in answer.json()["error"]["message"]


async def _stream(
    session: aiohttp.ClientSession, url: str, fields: dict, leave_after: float | None
) -> str:
    """Read one stream; 'left', 'complete', or what went wrong."""
    began, finished = time.monotonic(), False
    try:
        async with session.post(
            f"{url}/v1/completions", json=body(stream=True, **fields)
        ) as answer:
            if answer.status != 200:
                return f"status {answer.status}: {await answer.text()}"
            async for line in answer.content:
                if leave_after is not None and time.monotonic() - began > leave_after:
                    return "left"
                if b'"error"' in line:
                    return f"error {line!r}"
                finished = finished or b'"finish_reason":"length"' in line
                if line.startswith(b"data: [DONE]"):
                    return "complete" if finished else "[DONE] without a finish_reason"
    except aiohttp.ClientError as why:
        return f"broken {why!r}"
    return "ended silently"


async def _crowd(
    cluster: Cluster, count: int, seed: int, leaving: float, max_tokens: int = 60
) -> list[str]:
    rng = random.Random(seed)
    headers = {"authorization": f"Bearer {KEY}"}
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        jobs = []
        for i in range(count):
            fields = {
                "prompt": f"{i} " + "word " * rng.randint(1, 60),
                "max_tokens": rng.randint(5, max_tokens),
            }
            leave_after = rng.uniform(0.0, 1.0) if rng.random() < leaving else None
            jobs.append(_stream(session, cluster.url, fields, leave_after))
        return await asyncio.gather(*jobs)


def test_64_streams_with_random_disconnects_lose_nothing(cluster):
    results = asyncio.run(_crowd(cluster, 64, seed=1, leaving=0.4))
    cluster.all_blocks_free(within_s=1.0)
    assert set(results) <= {"complete", "left"}, results
    assert results.count("left") >= 5
    assert results.count("complete") >= 32


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_killed_node_costs_nothing_but_what_it_had(cluster, role):
    """kill -9 in the middle of 24 streams: they complete or end with an error; the next ones
    succeed on the rest.
    """
    victim = cluster.of(role)[0]

    async def kill_soon() -> None:
        await asyncio.sleep(
            random.Random(role).uniform(0.02, 0.1)
        )  # all of them take 0.2 s on an idle machine
        victim.kill(signal.SIGKILL)

    async def both() -> list[str]:
        results, _ = await asyncio.gather(_crowd(cluster, 24, seed=2, leaving=0.0), kill_soon())
        return results

    try:
        results = asyncio.run(both())
        assert all(r == "complete" or r.startswith(("error", "status 5")) for r in results), results
        # Other requests each time: one that was on two nodes when they died is refused for a while.
        after = asyncio.run(_crowd(cluster, 6, seed=3 if role == "decode" else 4, leaving=0.0))
        assert after == ["complete"] * 6
    finally:
        fresh = cluster.restart(victim)
        cluster.wait_ready(fresh)

    def both_up() -> bool:
        report = httpx2.get(f"{cluster.url}/health", timeout=5)
        return report.status_code == 200 and report.json()["status"] == "ok"

    wait_until(both_up, 60, "the router sees the restarted node")


def test_metrics_name_what_dashboards_scrape(cluster):
    node = cluster.of("decode")[0]
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:generation_tokens_total",
    ):
        node.metric(name)
    assert "kvrelay_" in httpx2.get(f"{cluster.url}/metrics", timeout=5).text
