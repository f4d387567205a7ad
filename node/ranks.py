"""Ranks of a tensor-parallel engine as processes: starts them, and ends with any that is lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import msgspec
import torch

from kvrelay.kv_transfer.connector import PoolRegion
from kvrelay.kv_transfer.rank_backends import LedBackends, join_connector, terms_of
from kvrelay.kv_transfer.ranks import LinkAddress, RankLink
from kvrelay.node.process import (
    PARENT_PID,
    describe_exit,
    die_with_parent,
    exit_now,
    freeze_imports,
    log_to_stderr,
    python_command,
)
from kvrelay.paged_engine.before_loading import check_engine, choose_device
from kvrelay.paged_engine.engine import broadcast_aside, run_follower
from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.rank_address import address_towards, check_rank_0, is_of_this_host
from kvrelay.paged_engine.ranks import Alone, Ranks, TorchRanks
from kvrelay.paged_engine.sharding import kv_head_range
from kvrelay.wire.config import EngineConfig, NodeConfig, RanksConfig
from kvrelay.wire.errors import KvrelayError

__all__ = ["join_as_rank_0", "meet_ranks", "pool_region", "run_ranks"]

log = logging.getLogger("kvrelay.ranks")


class _Place(msgspec.Struct, frozen=True):
    engine: EngineConfig
    rank: int
    device_index: int  # among the GPUs that this host's processes see


def join_as_rank_0(config: EngineConfig) -> Ranks:
    """Start this host's other ranks and meet all of them. Raises ConfigError."""
    size = config.tensor_parallel_size
    if size == 1:
        return Alone()
    check_engine(config)
    if config.tensor_parallel_address:
        check_rank_0(config.tensor_parallel_address)
    address = config.tensor_parallel_address or f"127.0.0.1:{_free_port()}"
    config = replace(config, tensor_parallel_address=address)
    for rank in range(1, config.tensor_parallel_size_local or size):
        _end_with(_start(_Place(config, rank, device_index=rank)), rank)
    return TorchRanks(address, 0, size, choose_device(config.device, 0))


def meet_ranks(
    ranks: Ranks, config: NodeConfig, num_kv_heads: int, engine_id: str
) -> RankLink | None:
    """Have the other ranks open their transfer backends. Raises ConfigError."""
    if ranks.size == 1:
        return None
    heads = [kv_head_range(num_kv_heads, rank, ranks.size) for rank in range(ranks.size)]
    address = config.engine.tensor_parallel_address
    host = address.rpartition(":")[0] if address else "127.0.0.1"
    link = RankLink(host, heads, engine_id, terms_of(config.transfer, heads[0][1] - heads[0][0]))
    broadcast_aside(ranks, msgspec.msgpack.encode(link.address))
    return link


def pool_region(pool: KVPool) -> PoolRegion:
    return PoolRegion(pool.address, pool.num_blocks, pool.block_bytes, str(pool.bytes.device))


def run_ranks(config: RanksConfig) -> int:
    """Run this host's ranks until they end or one fails; return the exit code.

    Raises ConfigError.
    """
    check_engine(config.engine)
    places = [
        _Place(config.engine, config.first + index, device_index=index)
        for index in range(config.engine.tensor_parallel_size_local)
    ]
    children = [_start(place) for place in places]
    try:
        for place, child in zip(places, children, strict=True):
            if code := child.wait():
                fate = describe_exit(code)
                log.error("rank %d ended (%s); the others end with it", place.rank, fate)
                return max(code, 1)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
    return 0


def _start(place: _Place) -> subprocess.Popen[bytes]:
    threads = place.engine.threads_on(len(os.sched_getaffinity(0)))
    child = subprocess.Popen(
        python_command("kvrelay.node.ranks", "-u"),
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), PARENT_PID: str(os.getpid())},
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(place))
    child.stdin.close()
    return child


def _end_with(child: subprocess.Popen[bytes], rank: int) -> None:
    def watch() -> None:
        if child.wait():
            fate = describe_exit(child.returncode)
            _end_at_once(f"rank {rank} ended ({fate}); the engine cannot go on without it")

    threading.Thread(target=watch, name=f"rank-{rank}", daemon=True).start()


def _end_at_once(why: str) -> None:
    # The main thread may wait for the lost rank's GPU forever.
    log.error("%s", why)
    logging.shutdown()
    os._exit(1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    if code := _follow():
        exit_now(code)


def _follow() -> int:
    die_with_parent()
    # Ctrl-C reaches the whole group, but rank 0 or the parent says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    freeze_imports()
    place = msgspec.json.decode(sys.stdin.buffer.read(), type=_Place)
    log_to_stderr(f"rank {place.rank}")
    config = place.engine
    joined: list[tuple[KVPool, LedBackends]] = []  # threads of the backends read the pool

    def meet(pool: KVPool, message: bytes) -> None:
        address = msgspec.msgpack.decode(message, type=LinkAddress)
        host = address.terms.host
        if not is_of_this_host(host):
            host = address_towards(f"{address.host}:{address.port}")
        region, end = pool_region(pool), lambda why: _end_at_once(f"this rank ends: {why}")
        joined.append((pool, join_connector(place.rank, region, address, host, end)))

    try:
        device = choose_device(config.device, place.device_index)
        ranks = TorchRanks(
            config.tensor_parallel_address, place.rank, config.tensor_parallel_size, device
        )
        run_follower(config, ranks, device, meet)
    except KvrelayError as why:
        log.error("rank %d: %s", place.rank, why)
        return 2
    except (RuntimeError, torch.distributed.DistError):
        log.exception("rank %d lost the others", place.rank)
        return 1
    for _, backends in joined:
        backends.close()
    return 0
