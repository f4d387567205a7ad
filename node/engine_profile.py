"""Profiles of the engine's steps on each rank, begun and ended by an operator."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from kvrelay.paged_engine.engine import Engine, broadcast_aside
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.wire.engine_messages import Profile, Profiled
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = ["EngineProfile", "ProfileSteps", "RankProfiler"]

log = logging.getLogger("kvrelay.engine")


class ProfileSteps(msgspec.Struct, tag="profile", frozen=True):
    config: ProfilerConfig
    begin: bool


class RankProfiler:
    def __init__(self, config: ProfilerConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        self._profile: profile | None = None
        self.running = False

    def start(self) -> None:
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

    def stop(self, done: Callable[[str], None]) -> None:
        """Stop recording; `done` gets why no trace was written, or "", perhaps on a thread.

        Writing may take half a minute, and a node whose engine is silent so long counts as dead.
        """
        self.running = False
        recorded, self._profile = self._profile, None
        if recorded is None:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            done("")
            return
        recorded.stop()
        threading.Thread(
            target=self._write, args=(recorded, done), name="profile", daemon=True
        ).start()

    def _write(self, recorded: profile, done: Callable[[str], None]) -> None:
        suffix = "json.gz" if self._config.torch_profiler_use_gzip else "json"
        process = f"{socket.gethostname()}-{os.getpid()}-rank-{self._rank}"
        name = f"kvrelay-{process}.{time.time_ns()}.pt.trace.{suffix}"
        path = Path(self._config.torch_profiler_dir, name)
        try:
            recorded.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as why:
            log.error("the profile cannot be written to %s: %s", path, why)
            done(f"the profile cannot be written to {path}: {why}")
        else:
            log.info("the profile is in %s", path)
            done("")


class EngineProfile:
    def __init__(
        self,
        config: ProfilerConfig | None,
        engine: Engine,
        ranks: Ranks,
        send: Callable[[Profiled], None],
        wakeup: Callable[[], None],
    ) -> None:
        self._config, self._engine, self._ranks = config, engine, ranks
        self._send, self._wakeup = send, wakeup
        self._profiler = RankProfiler(config or ProfilerConfig("cuda"), 0)
        self._last_step = 0
        self._stop_ids: list[int] = []
        self._writing = 0
        self._written: queue.SimpleQueue[str] = queue.SimpleQueue()

    def handle(self, message: Profile) -> None:
        """Begin or end a profile; doing so twice is no error."""
        assert self._config is not None, "the HTTP process refuses it"
        if message.begin:
            error = "" if self._profiler.running else self._begin(self._config)
            self._send(Profiled(message.profile_id, error))
            return
        self._stop_ids.append(message.profile_id)
        self._end()
        self._answer("")

    def poll(self) -> None:
        if self._last_step and self._engine.counters.steps >= self._last_step:
            self._end()
        while not self._written.empty():
            self._writing -= 1
            self._answer(self._written.get())

    def _begin(self, config: ProfilerConfig) -> str:
        try:
            self._profiler.start()
        except (OSError, RuntimeError) as why:
            return f"the profiler does not start: {why}"
        self._tell_ranks(begin=True)
        limit = config.max_iterations
        self._last_step = limit and self._engine.counters.steps + limit
        return ""

    def _end(self) -> None:
        self._last_step = 0
        if self._profiler.running:
            self._tell_ranks(begin=False)
            self._writing += 1
            self._profiler.stop(self._done)

    def _done(self, error: str) -> None:
        self._written.put(error)
        self._wakeup()

    def _answer(self, error: str) -> None:
        if not self._writing:
            for profile_id in self._stop_ids:
                self._send(Profiled(profile_id, error))
            self._stop_ids.clear()

    def _tell_ranks(self, *, begin: bool) -> None:
        if self._ranks.size > 1:
            assert self._config is not None
            broadcast_aside(self._ranks, msgspec.msgpack.encode(ProfileSteps(self._config, begin)))
