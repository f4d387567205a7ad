"""A profile of the engine's steps while it serves: begun and ended by an operator, a trace of each
rank.

Owns which profiler runs in this process. What it sees is turned into a file beside the loop,
because that may take half a minute and a node whose engine is silent for so long is taken for dead.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from kvrelay.node import rank_asides
from kvrelay.node.rank_asides import ProfileSteps
from kvrelay.paged_engine.engine import Engine, aside
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.wire.engine_messages import Profile, Profiled
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = ["EngineProfile", "RankProfiler"]

log = logging.getLogger("kvrelay.engine")

_Written = Callable[[str], None]


class RankProfiler:
    """The profiler of one rank's process. Belongs to the thread that computes."""

    def __init__(self, config: ProfilerConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._profile: profile | None = None
        self.running = False

    def start(self) -> None:
        """Record from now on. Raises OSError if the folder cannot be made."""
        config = self._config
        if config.profiler == "cuda":
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        else:
            Path(config.torch_profiler_dir).mkdir(parents=True, exist_ok=True)
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *on_gpu],
                record_shapes=config.torch_profiler_record_shapes,
                profile_memory=config.torch_profiler_with_memory,
                with_stack=config.torch_profiler_with_stack,
                with_flops=config.torch_profiler_with_flops,
            )
            self._profile.start()
        self.running = True

    def stop(self, written: _Written) -> None:
        """Record no more. `written` is called, on another thread perhaps, with why there is no
        trace, or nothing.
        """
        self.running = False
        seen, self._profile = self._profile, None
        if seen is None:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            written("")
            return
        seen.stop()
        threading.Thread(
            target=self._write, args=(seen, written), name="profile", daemon=True
        ).start()

    def _write(self, seen: profile, written: _Written) -> None:
        suffix = "json.gz" if self._config.torch_profiler_use_gzip else "json"
        name = f"kvrelay-{socket.gethostname()}-{os.getpid()}-rank-{self._rank}.{time.time_ns()}.pt.trace.{suffix}"
        path = Path(self._config.torch_profiler_dir, name)
        try:
            seen.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as why:
            log.error("the profile cannot be written to %s: %s", path, why)
            written(f"the profile cannot be written to {path}: {why}")
        else:
            log.info("the profile is in %s", path)
            written("")


class EngineProfile:
    """Profiles of an engine, on all of its ranks. Belongs to the loop's thread, but for the news of
    what is written.
    """

    def __init__(
        self,
        config: ProfilerConfig | None,
        engine: Engine,
        ranks: Ranks,
        send: Callable[[Profiled], None],
        wake: Callable[[], None],
    ) -> None:
        self._config, self._engine, self._ranks, self._send, self._wake = (
            config,
            engine,
            ranks,
            send,
            wake,
        )
        self._profiler = RankProfiler(config or ProfilerConfig("cuda"), 0)
        self._until = 0
        self._asked: list[int] = []
        """Who waits until what was seen is written."""
        self._writing = 0
        self._written: queue.SimpleQueue[str] = queue.SimpleQueue()

    def hear(self, ask: Profile) -> None:
        """Begin or end. What is so already is no error."""
        assert self._config is not None, "the HTTP process refuses it"
        if ask.begin:
            self._send(
                Profiled(
                    ask.profile_id, "" if self._profiler.running else self._begin(self._config)
                )
            )
            return
        self._asked.append(ask.profile_id)
        self._end()
        self._answer("")

    def turn(self) -> None:
        """Between two steps: end what has seen enough, and tell of what is written."""
        if self._until and self._engine.counters.steps >= self._until:
            self._end()
        while not self._written.empty():
            self._writing -= 1
            self._answer(self._written.get())

    def _begin(self, config: ProfilerConfig) -> str:
        try:
            self._profiler.start()
        except (OSError, RuntimeError) as why:
            return f"the profiler does not start: {why}"
        self._tell(begin=True)
        self._until = config.max_iterations and self._engine.counters.steps + config.max_iterations
        return ""

    def _end(self) -> None:
        self._until = 0
        if self._profiler.running:
            self._tell(begin=False)
            self._writing += 1
            self._profiler.stop(self._done)

    def _done(self, refused: str) -> None:
        self._written.put(refused)
        self._wake()

    def _answer(self, refused: str) -> None:
        if not self._writing:
            for profile_id in self._asked:
                self._send(Profiled(profile_id, refused))
            self._asked.clear()

    def _tell(self, *, begin: bool) -> None:
        if self._ranks.size > 1:
            assert self._config is not None
            aside(self._ranks, rank_asides.encode(ProfileSteps(self._config, begin)))
