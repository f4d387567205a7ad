"""Nodes of 1, 2 and 4 ranks on two GPUs: KV of every pair is equal to the byte, by the direct and
the NIXL plane.

Tokens are compared loosely: sums of bf16 depend on the number of ranks.
"""

from __future__ import annotations

import json

import pytest
from real_cluster import (
    TINY,
    Cluster,
    Process,
    complete,
    counted,
    free_port,
    ticket_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.gpu]

PREFILL, DECODE = (1, 2), (1, 2, 4)
COLD_S = 400.0  # every rank compiles every kernel
MODEL = TINY | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module", params=["direct", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    if request.param == "nixl":
        pytest.importorskip("nixl")
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(kind, tmp_path_factory):
    """Nodes of one rank have the second GPU. They start one after the other, because each measures
    what is free.
    """
    folder = tmp_path_factory.mktemp(f"tp-{kind}")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(MODEL))
    engine = ["--model", str(folder / "tiny"), "--load-format=dummy", "--device=cuda"]
    engine += [f"--kv-cache-memory-bytes={64 << 20}", "--max-num-seqs=8"]
    engine += ["--max-num-batched-tokens=256"]
    engine += ["--gpu-memory-utilization=0.1"]
    ours = Cluster(folder, engine)
    others: list[Process] = []
    try:
        for role, sizes in (("prefill", PREFILL), ("decode", DECODE)):
            for size in sizes:
                flags = [*engine, "--tensor-parallel-size", str(size)]
                if size == 4:
                    address = f"--tensor-parallel-address=127.0.0.1:{free_port()}"
                    flags += ["--tensor-parallel-size-local=1", address]
                    others = [
                        ours.start("rank", [*flags, "--machine", str(r)], env=host(r))
                        for r in (1, 2, 3)
                    ]
                env = {
                    1: {"CUDA_VISIBLE_DEVICES": "1"},
                    2: {"CUDA_VISIBLE_DEVICES": "0,1"},
                    4: host(0),
                }[size]
                more = ["--served-model-name=tiny", "--kv-connector", kind]
                more += ["--kv-checksums=1"]
                ours.nodes.append(ours.start(role, [*flags, *more], env=env))
        ours.wait_ready(*ours.nodes, within_s=COLD_S)
        yield ours
    finally:
        ours.stop()
        for rank in others:
            rank.popen.wait(20)


def host(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks on one GPU of a host, so that each says that it is a host of its own."""
    variables = {"NCCL_HOSTID": f"host-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    return variables | {"CUDA_VISIBLE_DEVICES": str(rank % 2)}


@pytest.mark.parametrize(
    ("prefill", "decode"), [(p, d) for p in range(len(PREFILL)) for d in range(len(DECODE))]
)
def test_tokens_are_near_those_of_one_rank_alone(cluster, kind, prefill, decode):
    source, reader = cluster.of("prefill")[prefill], cluster.of("decode")[decode]
    fetches = reader.metric("kvrelay_fetches_total")
    equal = 0
    for seed in range(8):
        prompt = [
            2 + (seed * 7919 + i * i) % 300 for i in range(300)
        ]  # several chunks, some of which sample nothing
        fields = {"max_tokens": 4, "logprobs": 0}
        ticket = ticket_of(source, prompt, logprobs=0)
        alone, ours = (
            complete(node.url, prompt, **fields, **more)["choices"][0]["logprobs"]
            for node, more in (
                (cluster.of("prefill")[0], {}),
                (reader, {"kv_transfer_params": ticket}),
            )
        )
        if ours["tokens"][:2] == alone["tokens"][:2]:  # else a near-tie
            equal += 1
            assert ours["token_logprobs"][:2] == pytest.approx(alone["token_logprobs"][:2], abs=0.1)
    assert equal >= 5
    counted([reader], "kvrelay_fetches_total", fetches + 8)
    counted([reader], "kvrelay_fetches_failed_total", 0)
    assert f"comes by {kind}," in reader.log.read_text()
    assert reader.metric("kvrelay_fetch_checked_blocks_total") > 0
    counted([reader], "kvrelay_fetch_wrong_blocks_total", 0)
    cluster.all_blocks_free()
