"""What the doctor says of what it has measured, and what is wrong with what was typed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvrelay import cli, doctor
from kvrelay.doctor import NodeSeen, PairSeen, Sample, failures, warnings
from kvrelay.drawn_keys import drawn_key
from kvrelay.wire.config import Role
from kvrelay.wire.sampling import SamplingDefaults

P = NodeSeen(Role.PREFILL, "http://p", name="prefill-0")
D = NodeSeen(Role.DECODE, "http://d", name="decode-0")
DOWN = NodeSeen(Role.DECODE, "http://x", name="decode-2", down="http://x/health: refused")
FOREIGN = NodeSeen(Role.DECODE, "http://v", kind="vllm")
SAMPLES = msgspec.structs.replace(D, sampling_defaults=SamplingDefaults(temperature=0.5))
OTHER_MODEL = msgspec.structs.replace(SAMPLES, model="b")


def pair(
    gb_s: float = 10.0,
    plane: str = "direct",
    same_host: bool = True,
    missed: str = "",
    refused: str = "",
    verified: bool = True,
    num_bytes: int = 64 << 20,
) -> PairSeen:
    samples = [Sample(64, num_bytes, 0.1, gb_s, verified)]
    told = dict([missed.split(": ")]) if missed else {}
    return PairSeen(P.name, D.name, refused, plane, same_host, told, samples)


@pytest.mark.parametrize(
    ("nodes", "pairs", "failed", "warned"),
    [
        ([P, D], [pair()], [], []),
        ([P, D], [pair(0.4, "nixl", missed="direct: no shared memory")], [],
         ["at 0.4 GB/s although the two share a host and could use direct: no shared memory"]),
        ([P, D], [pair(plane="nixl")], [], ["--kv-connector"]),
        ([P, D], [pair(40.0, "nixl", False, "direct: another host")], [], []),
        ([P, D], [pair(40.0, "nccl", False, "nixl: no agent")], [], ["and not by nixl: no agent"]),
        ([P, D], [pair(1.1, "nixl", False)], [], ["no more than 10 Gbit/s Ethernet gives"]),
        ([P, D], [pair(0.01, "nixl", False, num_bytes=1 << 19)], [], []),  # too little to tell
        ([P, D], [pair(refused="block_size is 16 here and 64 there")],
         ["decode-0 cannot take KV of prefill-0: block_size is 16 here and 64 there"], []),
        ([P, D], [pair(verified=False)], ["the bytes that arrived are not those that were sent"], []),
        ([P, D, DOWN], [pair()], ["decode-2 (http://x): http://x/health: refused"], []),
        ([P, DOWN], [], ["decode-2", "there is no pair"], []),
        ([P, D, FOREIGN], [pair()], [], ["http://v is not examined: it is no kvrelay node (vllm)"]),
        ([P, SAMPLES], [pair()], [], ["prefill-0 and decode-0 have different sampling defaults"]),
        ([P, D, OTHER_MODEL], [pair()], [], []),
    ],
)  # fmt: skip
def test_what_was_measured_is_judged(
    nodes: Sequence[NodeSeen], pairs: Sequence[PairSeen], failed: list[str], warned: list[str]
) -> None:
    for told, expected in ((failures(nodes, pairs), failed), (warnings(nodes, pairs), warned)):
        lines = list(told)
        assert len(lines) == len(expected), lines
        assert all(part in line for part, line in zip(expected, lines, strict=True)), lines


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--prefill http://a", 2, "at least one --prefill URL and one --decode URL"),
        ("--router http://r --prefill http://a --decode http://b", 2, "either a --router"),
        ("--router ftp://r", 2, "'ftp://r' is no address of a server"),
        ("--router 127.0.0.1:9/v1", 1, "http://127.0.0.1:9/health cannot be reached"),
    ],
)
def test_what_cannot_be_examined_is_one_line(
    arguments: str, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["doctor", *arguments.split()]) == code
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("--router http://127.0.0.1:8000", True),
        ("--router 127.0.0.1:8000/v1/", True),
        ("--router http://127.0.0.1:8124", False),
        ("--router http://10.0.0.1:8000", False),
        ("--prefill http://localhost:1 --decode http://127.0.0.1:2", True),
        ("--prefill http://localhost:1 --decode http://10.0.0.1:2", False),
        ("--prefill http://localhost:1 --decode http://[x", False),
    ],
)
def test_only_the_nodes_of_our_own_cluster_are_told_the_drawn_key(
    arguments: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []
    monkeypatch.setattr(doctor, "examine", lambda *given, as_json: keys.append(given[3]) or 0)
    monkeypatch.delenv("KVRELAY_NODE_API_KEY", raising=False)
    with drawn_key("nodes", 8000) as key:
        assert cli.run(["doctor", *arguments.split()]) == 0
        assert cli.run(["doctor", *arguments.split(), "--node-api-key", "given"]) == 0
    assert keys == [key if found else "", "given"]
