"""The ranks of a tensor-parallel engine as processes: starts those of this host, and ends this
process if one is lost.

Rank 0 is the engine process; every other rank is a process of its own with its place as JSON on
stdin. Beside the steps a rank opens its data planes (led by rank 0's desk) and does its share of
probes.
"""

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
from kvrelay.kv_transfer.rank_backends import LedBackends
from kvrelay.kv_transfer.ranks import RankLink
from kvrelay.kv_transfer.transfer_engine import join_connector, terms_of
from kvrelay.node import rank_asides
from kvrelay.node.collector import command_of, imports_are_done
from kvrelay.node.engine_profile import RankProfiler
from kvrelay.node.last_words import fate_of, leave
from kvrelay.node.parent import PARENT_PID, die_with_parent
from kvrelay.node.probe_pattern import ProbePattern
from kvrelay.node.process_log import log_to_stderr
from kvrelay.node.rank_asides import FillBlocks, Meet, ProfileSteps, VerifyBlocks
from kvrelay.paged_engine.before_loading import check_engine, choose_device
from kvrelay.paged_engine.engine import aside, follow
from kvrelay.paged_engine.kv_pool import KVPool
from kvrelay.paged_engine.rank_address import address_towards, check_rank_0, is_of_this_host
from kvrelay.paged_engine.ranks import Alone, Ranks, TorchRanks
from kvrelay.paged_engine.sharding import kv_heads_of
from kvrelay.wire.config import EngineConfig, NodeConfig, RanksConfig
from kvrelay.wire.errors import KvrelayError
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = ["join_as_rank_0", "meet_ranks", "region_of", "run_ranks"]

log = logging.getLogger("kvrelay.ranks")


class _Place(msgspec.Struct, frozen=True):
    """What one rank process is told."""

    engine: EngineConfig
    rank: int
    device_index: int  # among the GPUs that this host's processes see


def join_as_rank_0(config: EngineConfig) -> Ranks:
    """Start this host's other ranks and meet all of them. Raises ConfigError if they do not come.

    What they could not serve is refused before they are started: they may be awaited for minutes.
    """
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
    """Rank 0: let the other ranks open their data planes; the link to them, if there are any.
    Raises ConfigError.
    """
    if ranks.size == 1:
        return None
    heads = [kv_heads_of(num_kv_heads, rank, ranks.size) for rank in range(ranks.size)]
    address = config.engine.tensor_parallel_address
    host = address.rpartition(":")[0] if address else "127.0.0.1"
    link = RankLink(host, heads, engine_id, terms_of(config.transfer, heads[0][1] - heads[0][0]))
    aside(ranks, rank_asides.encode(Meet(link.address)))
    return link


def region_of(pool: KVPool) -> PoolRegion:
    """A rank's pool, as data planes know it."""
    return PoolRegion(pool.address, pool.num_blocks, pool.block_bytes, str(pool.bytes.device))


def run_ranks(config: RanksConfig) -> int:
    """Run this host's ranks until they end, and all end if one fails: the command `kvrelay rank`.
    Its exit code.

    Raises ConfigError if they cannot work as configured.
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
                log.error("rank %d ended (%s); the others end with it", place.rank, fate_of(code))
                return max(code, 1)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
    return 0


def _start(place: _Place) -> subprocess.Popen[bytes]:
    threads = place.engine.threads_on(os.cpu_count() or 1)
    child = subprocess.Popen(
        command_of("kvrelay.node.ranks", "-u"),
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), PARENT_PID: str(os.getpid())},
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(place))
    child.stdin.close()
    return child


def _end_with(child: subprocess.Popen[bytes], rank: int) -> None:
    """End this process when the child fails: its main thread may be waiting for the lost rank on
    the GPU, forever.
    """

    def watch() -> None:
        if child.wait():
            log.error(
                "rank %d ended (%s); the engine cannot go on without it",
                rank,
                fate_of(child.returncode),
            )
            logging.shutdown()
            os._exit(1)

    threading.Thread(target=watch, name=f"rank-{rank}", daemon=True).start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Beside:
    """What a rank other than 0 does beside the steps."""

    def __init__(self, ranks: TorchRanks) -> None:
        self._ranks = ranks
        self._planes: LedBackends | None = None
        self._profiler: RankProfiler | None = None
        self._pool: KVPool | None = None  # which threads of the planes read until they end

    def heard(self, pool: KVPool, message: bytes) -> None:
        """Rank 0 has said something that is not about a step."""
        match rank_asides.decode(message):
            case Meet(meeting):
                kv_host = meeting.terms.host
                host = (
                    kv_host
                    if is_of_this_host(kv_host)
                    else address_towards(f"{meeting.host}:{meeting.port}")
                )
                self._pool = pool
                self._planes = join_connector(
                    self._ranks.rank, region_of(pool), meeting, host, _end_at_once
                )
            case FillBlocks(seed, blocks, num_kv_heads):
                ProbePattern(pool, num_kv_heads, self._ranks.rank, self._ranks.size).fill(
                    seed, blocks
                )
                self._ranks.least(1)
            case VerifyBlocks(seed, blocks, num_kv_heads):
                held = ProbePattern(pool, num_kv_heads, self._ranks.rank, self._ranks.size).holds(
                    seed, blocks
                )
                self._ranks.least(int(held))
            case ProfileSteps(config, begin):
                self._profile(config, begin=begin)

    def _profile(self, config: ProfilerConfig, *, begin: bool) -> None:
        if begin:
            self._profiler = RankProfiler(config, self._ranks.rank)
            try:
                self._profiler.start()
            except (OSError, RuntimeError) as why:
                log.error("rank %d is not profiled: %s", self._ranks.rank, why)
        elif self._profiler is not None and self._profiler.running:
            self._profiler.stop(lambda _: None)

    def close(self) -> None:
        """End the planes, and let go of the pool."""
        if self._planes is not None:
            self._planes.close()
        self._pool = None


def _end_at_once(why: str) -> None:
    """The main thread may be waiting for rank 0, on the GPU for ever."""
    log.error("this rank ends: %s", why)
    logging.shutdown()
    os._exit(1)


def main() -> None:
    """Entry point of the process of a rank other than 0."""
    if code := _followed():
        leave(code)


def _followed() -> int:
    """Follow rank 0 to the end; the exit code."""
    die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; rank 0 or the parent says when to end
    imports_are_done()
    place = msgspec.json.decode(sys.stdin.buffer.read(), type=_Place)
    log_to_stderr(f"rank {place.rank}")
    config = place.engine
    try:
        device = choose_device(config.device, place.device_index)
        ranks = TorchRanks(
            config.tensor_parallel_address, place.rank, config.tensor_parallel_size, device
        )
        beside = _Beside(ranks)
        follow(config, ranks, device, beside.heard)
    except KvrelayError as why:
        log.error("rank %d: %s", place.rank, why)
        return 2
    except (RuntimeError, torch.distributed.DistError):
        log.exception("rank %d lost the others", place.rank)
        return 1
    beside.close()
    return 0
