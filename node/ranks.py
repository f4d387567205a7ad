"""The ranks of a tensor-parallel engine as processes: starts those of this host, and ends this process if one is lost.

Rank 0 is the engine process; every other rank is `python -m node.ranks` with its place as JSON on stdin.
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

from node.last_words import leave
from node.parent import PARENT_PID, die_with_parent
from paged_engine.before_loading import check_engine, choose_device
from paged_engine.engine import follow
from paged_engine.rank_address import check_rank_0
from paged_engine.ranks import Alone, Ranks, TorchRanks
from wire.config import EngineConfig, RanksConfig
from wire.errors import KvrelayError

__all__ = ["join_as_rank_0", "run_ranks"]

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
    size = config.tensor_parallel
    if size == 1:
        return Alone()
    check_engine(config)
    if config.tensor_parallel_address:
        check_rank_0(config.tensor_parallel_address)
    address = config.tensor_parallel_address or f"127.0.0.1:{_free_port()}"
    config = replace(config, tensor_parallel_address=address)
    for rank in range(1, config.tensor_parallel_local or size):
        _end_with(_start(_Place(config, rank, device_index=rank)), rank)
    return TorchRanks(address, 0, size, choose_device(config.device, 0))


def run_ranks(config: RanksConfig) -> int:
    """The command `kvrelay rank`: this host's ranks, until they end. Their exit code; if one fails all are ended.

    Raises ConfigError if they cannot work as configured.
    """
    check_engine(config.engine)
    places = [
        _Place(config.engine, config.first_rank + index, device_index=index)
        for index in range(config.engine.tensor_parallel_local)
    ]
    children = [_start(place) for place in places]
    code = 0
    try:
        for child in children:
            code = code or child.wait()
            if code:
                break
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
    return code


def _start(place: _Place) -> subprocess.Popen[bytes]:
    threads = place.engine.threads_on(os.cpu_count() or 1)
    child = subprocess.Popen(
        [sys.executable, "-P", "-u", "-m", "node.ranks"],
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), PARENT_PID: str(os.getpid())},
    )
    assert child.stdin is not None
    child.stdin.write(msgspec.json.encode(place))
    child.stdin.close()
    return child


def _end_with(child: subprocess.Popen[bytes], rank: int) -> None:
    """End this process when the child fails: its main thread may be waiting for the lost rank on the GPU, forever."""

    def watch() -> None:
        if child.wait():
            log.error("rank %d ended with exit code %d; the engine cannot go on without it", rank, child.returncode)
            logging.shutdown()
            os._exit(1)

    threading.Thread(target=watch, name=f"rank-{rank}", daemon=True).start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Entry point of a rank other than 0."""
    die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; rank 0 or the parent says when to end
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    place = msgspec.json.decode(sys.stdin.buffer.read(), type=_Place)
    config = place.engine
    try:
        device = choose_device(config.device, place.device_index)
        ranks = TorchRanks(config.tensor_parallel_address, place.rank, config.tensor_parallel, device)
        follow(config, ranks, device)
    except KvrelayError as why:
        log.error("rank %d: %s", place.rank, why)
        return 2
    except (RuntimeError, torch.distributed.DistError):
        log.exception("rank %d lost the others", place.rank)
        return 1
    ranks.close()
    return 0


if __name__ == "__main__":
    if code := main():
        leave(code)
