"""What the doctor says of what it has measured, and what is wrong with what was typed."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay import cli, doctor
from kvrelay.doctor import NodeSeen, PairSeen, Sample, judge
from kvrelay.drawn_keys import drawn_key
from kvrelay.wire.sampling import SamplingDefaults

NODES = [NodeSeen("prefill-0", "prefill", "http://p"), NodeSeen("decode-0", "decode", "http://d")]


def pair(
    gb_s: float = 10.0,
    plane: str = "direct",
    *,
    same_host: bool = True,
    missed: dict[str, str] | None = None,
    prefill: str = "prefill-0",
    decode: str = "decode-0",
    verified: bool = True,
    num_bytes: int = 64 << 20,
) -> PairSeen:
    samples = [
        Sample(1, num_bytes // 64, 1e-3, 1e-3, gb_s / 100, verified=True),
        Sample(64, num_bytes, 0.1, 0.1, gb_s, verified),
    ]
    return PairSeen(prefill, decode, None, plane, same_host, missed or {}, samples)


def test_a_cluster_without_fault_has_none() -> None:
    report = judge(NODES, [pair()])
    assert (report.healthy, report.failures, report.warnings) == (True, [], [])


def test_a_slow_path_on_one_host_says_why() -> None:
    reason = "the node that reads: no shared memory"
    report = judge(NODES, [pair(0.4, "nixl", missed={"direct": reason})])
    assert report.healthy
    assert report.warnings == [
        f"decode-0 reads prefill-0 by nixl at 0.4 GB/s although the two share a host and could "
        f"use direct: {reason}"
    ]


def test_a_forced_connector_is_named_as_the_reason() -> None:
    (warning,) = judge(NODES, [pair(plane="nixl")]).warnings
    assert "--kv-connector" in warning


def test_between_hosts_direct_is_not_missed_but_nixl_is_and_tcp_is_noticed() -> None:
    far = pair(40.0, "nixl", same_host=False, missed={"direct": "another host"})
    assert judge(NODES, [far]).warnings == []
    (warning,) = judge(
        NODES, [pair(40.0, "nccl", same_host=False, missed={"nixl": "no agent"})]
    ).warnings
    assert warning == "decode-0 reads prefill-0 by nccl at 40 GB/s and not by nixl: no agent"
    (warning,) = judge(NODES, [pair(1.1, "nixl", same_host=False)]).warnings
    assert "at 1.1 GB/s, no more than 10 Gbit/s Ethernet gives" in warning


def test_a_pair_that_is_much_slower_than_its_like_is_named() -> None:
    pairs = [pair(300.0), pair(290.0, decode="decode-1"), pair(40.0, decode="decode-2")]
    assert judge(NODES, pairs).warnings == [
        "decode-2 reads prefill-0 by direct at 40 GB/s, and another pair does 300 GB/s the same "
        "way: compare their hosts and links"
    ]
    unlike = [pair(300.0), pair(40.0, "nixl", same_host=False, decode="decode-1")]
    assert judge(NODES, unlike).warnings == []


def test_a_few_kilobytes_say_nothing_of_the_rate() -> None:
    assert judge(NODES, [pair(0.01, "nixl", same_host=False, num_bytes=1 << 19)]).warnings == []


def test_refusals_wrong_bytes_and_nodes_that_are_down_are_failures() -> None:
    refused = PairSeen(
        "prefill-0",
        "decode-1",
        refused="decode-1: Incompatible: block_size is 16 here and 64 there",
    )
    down = NodeSeen(
        "decode-2", "decode", "http://x", down="http://x/health cannot be reached: refused"
    )
    report = judge([*NODES, down], [pair(), refused, pair(verified=False, decode="decode-3")])
    assert not report.healthy
    assert report.failures[:2] == [
        "decode-2 (http://x): http://x/health cannot be reached: refused",
        "decode-1 cannot take KV of prefill-0: decode-1: Incompatible: block_size is 16 here and "
        "64 there",
    ]
    assert (
        "decode-3 reads prefill-0 by direct at 10 GB/s, and the bytes that arrived are not"
        in report.failures[2]
    )
    assert "probes of 64 blocks" in report.failures[2]
    assert report.warnings == []


def test_no_pair_at_all_is_a_failure() -> None:
    assert judge(NODES, []).failures == [
        "there is no pair of a prefill and a decode node that are both up"
    ]


def test_each_model_has_pairs_of_its_own() -> None:
    def node(name: str, model: str) -> NodeSeen:
        return NodeSeen(name, name.partition("-")[0], f"http://{name}", model=model)

    nodes = [
        node("prefill-0", "a"),
        node("decode-0", "a"),
        node("prefill-1", "b"),
        node("decode-1", "b"),
    ]
    both = [pair(), pair(prefill="prefill-1", decode="decode-1")]
    assert judge(nodes, both).healthy
    assert judge(nodes, both[:1]).failures == [
        "there is no pair of a prefill and a decode node with the model 'b' that are both up"
    ]
    other = judge(nodes, both, ["http://v is not examined: it is no kvrelay node (vllm)"])
    assert (other.healthy, other.warnings) == (
        True,
        ["http://v is not examined: it is no kvrelay node (vllm)"],
    )


def test_prompts_computed_on_decode_nodes_are_a_warning() -> None:
    nodes = [NODES[0], NodeSeen("decode-0", "decode", "http://d", recomputed_prompts=7)]
    report = judge(nodes, [pair()])
    assert report.healthy
    assert "decode-0 has computed 7 prompts itself since its start" in report.warnings[0]


def test_nodes_of_one_model_that_sample_differently_are_a_warning() -> None:
    own = SamplingDefaults(temperature=0.5)
    nodes = [NODES[0], NodeSeen("decode-0", "decode", "http://d", sampling_defaults=own)]
    report = judge(nodes, [pair()])
    assert report.healthy
    assert report.warnings[0].startswith("prefill-0 and decode-0 have different sampling defaults")
    assert (
        judge(
            [msgspec.structs.replace(nodes[0], sampling_defaults=own), nodes[1]], [pair()]
        ).warnings
        == []
    )
    other = msgspec.structs.replace(nodes[1], model="b")
    assert judge([nodes[0], other], [pair()]).warnings == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--prefill", "http://a"], 2, "at least one --prefill URL and one --decode URL"),
        (
            ["--router", "http://r", "--prefill", "http://a", "--decode", "http://b"],
            2,
            "either a --router",
        ),
        (
            ["--router", "ftp://r"],
            2,
            "'ftp://r' is no address of a server; give one like http://127.0.0.1:8000",
        ),
        (["--router", "127.0.0.1:9/v1"], 1, "http://127.0.0.1:9/health cannot be reached"),
    ],
)
def test_what_cannot_be_examined_is_one_line(
    arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", *arguments]) == code
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--router", "http://127.0.0.1:8123"], True),
        (["--router", "127.0.0.1:8123/v1/"], True),
        (["--router", "http://127.0.0.1:8124"], False),
        (["--router", "http://10.0.0.1:8123"], False),
    ],
)
def test_it_finds_the_key_of_the_nodes_of_our_own_cluster(
    arguments: list[str], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(doctor, "examine", lambda *given, as_json: keys.append(given[3]) or 0)
    monkeypatch.delenv("KVRELAY_NODE_API_KEY", raising=False)
    with drawn_key("nodes", 8123) as key:
        assert cli.run(["doctor", *arguments]) == 0
        assert cli.run(["doctor", *arguments, "--node-api-key", "given"]) == 0
    assert keys == [key if found else "", "given"]


def test_a_node_elsewhere_is_not_told_the_key_of_our_own_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(doctor, "examine", lambda *given, as_json: keys.append(given[3]) or 0)
    monkeypatch.delenv("KVRELAY_NODE_API_KEY", raising=False)
    with drawn_key("nodes", 8000) as key:
        for decode in ("http://127.0.0.1:2", "http://10.0.0.1:2", "http://[x"):
            assert cli.run(["doctor", "--prefill", "http://localhost:1", "--decode", decode]) == 0
    assert keys == [key, "", ""]
