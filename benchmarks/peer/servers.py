"""The servers of an arm, and its router: started, kept while the next arm has the same ones, and
ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Self

from benchmarks.local_cluster import child, free_ports, wait_until_healthy
from benchmarks.peer.arms import Arm, Kind, Setting, router_command, server_command

__all__ = ["Servers", "Stage"]

_START_S = 400.0
_TAIL_BYTES = 3000


@dataclass(frozen=True, slots=True)
class Stage:
    """A set of servers that run at a time, in the order of the GPUs. `caching`: of prefixes."""

    kinds: tuple[Kind, ...]
    caching: bool


class Servers:
    """A keeper of the servers of one stage at a time; none is left when it is."""

    def __init__(self, setting: Setting, gpus: Sequence[str], logs: Path) -> None:
        self._setting, self._gpus, self._logs = setting, gpus, logs
        self._kept, self._started = ExitStack(), 0
        self._processes: list[tuple[Popen[bytes], Path]] = []
        self.stage: Stage | None = None
        self.urls: list[str] = []

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def have(self, stage: Stage) -> None:
        """Start its servers, unless they are there. Raises RuntimeError with the log of one that
        does not get ready.
        """
        if stage == self.stage:
            return
        self._end()
        try:
            self._start(stage)
        except BaseException:
            self._end()
            raise
        self.stage = stage

    def check(self) -> None:
        for process, log in self._processes:
            if process.poll() is not None:
                raise RuntimeError(
                    f"a server has ended with code {process.returncode}:\n{_tail(log)}"
                )

    @contextmanager
    def behind_router(
        self, arm: Arm, urls: Sequence[str], told: Sequence[str]
    ) -> Iterator[list[str]]:
        """Start a new router in front of these servers, if the arm has one, with flags `told`."""
        if arm.router is None:
            yield list(urls)
            return
        (port,) = free_ports(1)
        with ExitStack() as kept:
            url = f"http://127.0.0.1:{port}"
            self._wait(
                url, *self._launch(kept, router_command(arm, urls, port, told), {}, arm.name)
            )
            yield [url]

    def _start(self, stage: Stage) -> None:
        ports = free_ports(2 * len(stage.kinds))
        urls = []
        for at, kind in enumerate(stage.kinds):
            port = ports[2 * at]
            env = (
                {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports[2 * at + 1])}
                if kind is Kind.VLLM_KV
                else {}
            )
            if self._gpus:
                env["CUDA_VISIBLE_DEVICES"] = self._gpus[at]
            argv = server_command(kind, port, self._setting, caching=stage.caching)
            self._processes.append(self._launch(self._kept, argv, env, kind))
            urls.append(f"http://127.0.0.1:{port}")
        for url, (process, log) in zip(urls, self._processes, strict=True):
            self._wait(url, process, log)
        self.urls = urls

    def _launch(
        self, kept: ExitStack, argv: list[str], env: dict[str, str], name: str
    ) -> tuple[Popen[bytes], Path]:
        self._started += 1
        path = self._logs / f"{os.getpid()}-{self._started}-{name}.log"
        log = kept.enter_context(path.open("wb"))
        return kept.enter_context(
            child(argv, log, {**os.environ, **self._setting.env, **env})
        ), path

    def _wait(self, url: str, process: Popen[bytes], log: Path) -> None:
        try:
            wait_until_healthy(url, process, _START_S)
        except (RuntimeError, TimeoutError) as why:
            raise RuntimeError(
                f"{log.stem} is not ready: {why or 'too late'}\n{_tail(log)}"
            ) from why

    def _end(self) -> None:
        self.stage, self.urls, self._processes = None, [], []
        self._kept.close()


def _tail(log: Path) -> str:
    return log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
