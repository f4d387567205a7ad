"""A source and a reader of KV, each in a process of its own, and hand-overs between them.

Each call to a process has a deadline, after which it is killed, and both are ended on every way
out. All times are in seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.node.process import PARENT_PID
from kvrelay.wire.child_environ import child_environ
from kvrelay.wire.errors import TransferError

__all__ = ["Part", "Pair", "Took", "open_pair"]

# Import of torch from a cold disk and a pool of some GiB; compilers, NIXL's start; closing a
# connector.
START_S, OPEN_S, END_S = 60.0, 60.0, 5.0
# A call that only talks, or touches memory.
CALL_S = 30.0
# Of a transfer: what the connector itself allows, and a little more, so that its own sentence comes
# first.
FETCH_S, FLOOR_BYTES_S = 12.0, 100e6


@dataclass(frozen=True, slots=True)
class Part:
    """A transfer of remote block i into local block i."""

    remote: list[int]
    local: list[int]


@dataclass(frozen=True, slots=True)
class Took:
    """A measured hand-over of one or several transfers, in seconds."""

    exposed_s: float
    """By the reader's Fetched event: from the fetch, or from the last announcement. Of several the
    longest.
    """
    in_hand_s: float
    """The same by a clock outside: from the call of fetch (the source's call of complete) to the
    last event seen.
    """
    call_s: float
    """How long `fetch` holds its caller up."""
    checked_blocks: int = 0
    """Of all parts' blocks, those that were compared with the source's."""


class Pair:
    """A source and a reader. Calls raise TransferError with the sentence of the end that failed."""

    def __init__(self, source: _EndProcess, reader: _EndProcess) -> None:
        self._source = source
        self._reader = reader
        self._names = 0
        self.about: list[dict[str, Any]] = self._both("about", within_s=START_S)
        self.num_blocks: list[int] = []
        """Of either pool, once a connector is open."""
        self._block_bytes = 0

    def open(self, kind: str, block_bytes: int, checksums: float = 0.0) -> None:
        """Open a connector on both ends; `checksums` is the share of blocks that are compared."""
        self._both("close", within_s=CALL_S)
        self.num_blocks = self._both("open", kind, block_bytes, checksums, within_s=OPEN_S)
        self._block_bytes = block_bytes

    def hand_over(self, parts: Sequence[Part], lead_s: float) -> Took:
        """Hand all parts over at once, with tickets that were watched for `lead_s`."""
        names = self._offered(parts, growing=False, lead_s=lead_s, more_s=0.0)
        return self._taken(names, None)

    def hand_over_growing(self, part: Part, chunks: int, spacing_s: float, lead_s: float) -> Took:
        """Hand one part over that grows in equal chunks, the first `spacing_s` after the fetch."""
        (name,) = self._offered([part], growing=True, lead_s=lead_s, more_s=chunks * spacing_s)
        ready = [len(part.local) * (chunk + 1) // chunks for chunk in range(chunks)]
        within_s = CALL_S + chunks * spacing_s
        told_at = self._source.ask(
            "announce", name, ready, lead_s + spacing_s, spacing_s, within_s=within_s
        )
        return self._taken([name], float(told_at))

    def poison(self, parts: Sequence[Part]) -> None:
        """Overwrite the local blocks of these parts."""
        self._reader.ask(
            "poison", [block for part in parts for block in part.local], within_s=CALL_S
        )

    def verify(self, parts: Sequence[Part]) -> int:
        """Compare all bytes of these parts with the source's; return how many."""
        remote = [block for part in parts for block in part.remote]
        local = [block for part in parts for block in part.local]
        return int(self._reader.ask("verify", remote, local, within_s=CALL_S))

    def _offered(
        self, parts: Sequence[Part], *, growing: bool, lead_s: float, more_s: float
    ) -> list[str]:
        names = [f"transfer-{self._names + number}" for number in range(len(parts))]
        self._names += len(parts)
        offers = [[name, part.remote] for name, part in zip(names, parts, strict=True)]
        tickets = self._source.ask("offer", offers, growing, within_s=CALL_S)
        num_bytes = sum(len(part.local) for part in parts) * self._block_bytes
        self._take_s = FETCH_S + num_bytes / FLOOR_BYTES_S + lead_s + more_s
        takes = [
            [name, ticket, part.local]
            for name, ticket, part in zip(names, tickets, parts, strict=True)
        ]
        self._reader.tell("take", takes, lead_s, self._take_s, within_s=CALL_S)
        return names

    def _taken(self, names: Sequence[str], told_at: float | None) -> Took:
        took = self._reader.hear(self._take_s + END_S)
        self._source.ask("released", len(names), within_s=CALL_S)
        since = took["asked_at"] if told_at is None else told_at
        return Took(
            max(took["exposed_s"]),
            took["in_hand_at"] - since,
            took["call_s"],
            took["checked_blocks"],
        )

    def _both(self, method: str, *arguments: Any, within_s: float) -> list[Any]:
        ends = (self._source, self._reader)
        for end in ends:
            end.tell(method, *arguments, within_s=within_s)
        return [end.hear(within_s) for end in ends]


class _EndProcess:
    def __init__(
        self, name: str, device: str, pool_bytes: int, unit_bytes: int, until: float
    ) -> None:
        self._name = name
        self._until = until
        self._asked = ""
        self._late = False
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvrelay.profiling.transfer_end",
                name,
                device,
                str(pool_bytes),
                str(unit_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                # the NIXL plane sets one that UCX knows on a GPU only
                "UCX_WARN_UNUSED_ENV_VARS": "n",
                **child_environ(),
                PARENT_PID: str(os.getpid()),
            },
        )

    def ask(self, method: str, *arguments: Any, within_s: float) -> Any:
        self.tell(method, *arguments, within_s=within_s)
        return self.hear(within_s)

    def tell(self, method: str, *arguments: Any, within_s: float) -> None:
        self._asked = method
        assert self.process.stdin is not None
        with (
            self._watched(within_s),
            contextlib.suppress(BrokenPipeError),
        ):  # then there is no answer either
            self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
            self.process.stdin.flush()

    def hear(self, within_s: float) -> Any:
        assert self.process.stdout is not None
        asked_at = time.monotonic()
        with self._watched(within_s):
            line = self.process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a core dump takes its time
                self.process.wait(END_S)
            why = f"ended (status {self.process.poll()})"
            if self._late:
                over = ", when the time for this connector was over"
                why = f"was killed after {time.monotonic() - asked_at:.1f} s"
                why += over if time.monotonic() >= self._until else ""
            raise TransferError(f"the {self._name} gave no answer to {self._asked!r}: it {why}")
        answer, error = json.loads(line)
        if error:
            raise TransferError(error)
        return answer

    def end(self, until: float) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        if self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # a driver that gives memory back; the kill stands
                self.process.wait(END_S)
        self.process.stdout.close()

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def _kill(self) -> None:
        self._late = True
        self.process.kill()

    @contextlib.contextmanager
    def _watched(self, within_s: float) -> Iterator[None]:
        limit_s = max(0.0, min(within_s, self._until - time.monotonic()))
        watchdog = threading.Timer(limit_s, self._kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()


@contextlib.contextmanager
def open_pair(
    devices: Sequence[str], pool_bytes: int, unit_bytes: int, until: float
) -> Iterator[Pair]:
    """Start a source and a reader, each with a pool of `pool_bytes` if there is room.

    Pools are multiples of `unit_bytes`; nothing is waited for beyond the monotonic time `until`.
    """
    ends: list[_EndProcess] = []
    try:
        for name, device in zip(("source", "reader"), devices, strict=True):
            ends.append(_EndProcess(name, device, pool_bytes, unit_bytes, until))
        yield Pair(*ends)
    finally:
        for end in ends:
            end.hang_up()
        kill_at = time.monotonic() + END_S
        for end in ends:
            end.end(kill_at)
