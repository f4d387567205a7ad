"""How much memory processes of ours may still take here: of the machine, and of each cgroup that
they are in.

A cgroup (a container, a systemd slice) may allow less than the machine has, and any of those around
it less still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError

__all__ = ["Memory", "NotNow", "check_memory", "memory_here"]

# By version of cgroups: file of the limit, file of what is used, and in memory.stat what of that
# the kernel would drop.
_FILES = {
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


class NotNow(ConfigError):
    """A refusal for memory that others have now: the same may work later."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that may be taken, in bytes."""

    whose: str
    total: int
    free: int


def memory_here(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Memory]:
    """List what the machine and each cgroup of this process allow. Swap is not counted: KV in it
    serves nobody.

    Empty on systems that do not tell as Linux does.
    """
    try:
        lines = dict(
            line.split(":", 1)
            for line in (proc / "meminfo").read_text().splitlines()
            if ":" in line
        )
        sizes = [int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")]
    except (OSError, ValueError, LookupError):
        return []
    return [Memory("this machine", *sizes), *_of_cgroups(proc / "self" / "cgroup", cgroups)]


def _of_cgroups(listed: Path, cgroups: Path) -> Iterator[Memory]:
    try:
        lines = [line.split(":", 2) for line in listed.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in filter(lambda line: len(line) == 3, lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents[: len(inner.relative_to(root).parts)]):
            found = _of_cgroup(
                folder, f"/{folder.relative_to(root)}".replace("/.", "/"), 1 if controllers else 2
            )
            if found is not None:
                yield found


def _of_cgroup(folder: Path, name: str, version: int) -> Memory | None:
    limit_file, used_file, droppable = _FILES[version]
    try:
        limit, used = (int((folder / file).read_text()) for file in (limit_file, used_file))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(stat.get(key, 0)) for key in droppable)
    except (OSError, ValueError):  # not there, or "max"
        return None
    return Memory(f"the cgroup {name}", limit, max(0, limit - used + cached))


def check_memory(here: Sequence[Memory], weights: int, pools: int, nodes: int) -> None:
    """Raise ConfigError if engines with so many bytes of weights and of KV pools, all together, do
    not fit.

    The error is NotNow if they only do not fit beside what else runs here.
    """
    needed = weights + pools
    several = f"{nodes} nodes together need" if nodes > 1 else "the engine needs"
    need = (
        f"{several} at least {gib(needed)} of memory ({gib(weights)} of weights, {gib(pools)} "
        f"of KV pool)"
    )
    smaller = "take a smaller model" + (" or fewer nodes" if nodes > 1 else "")
    for each in sorted(here, key=lambda each: each.total):
        if needed > each.total:
            raise ConfigError(
                f"{need}, and {each.whose} has {gib(each.total)}; "
                f"{_lower(each.total, weights, smaller)}"
            )
    for each in sorted(here, key=lambda each: each.free):
        if needed > each.free:
            raise NotNow(
                f"{need}, and of {each.whose}'s {gib(each.total)} only {gib(each.free)} are free; "
                f"end what else runs "
                f"there, or {_lower(each.free, weights, smaller)}"
            )


def _lower(room: int, weights: int, smaller: str) -> str:
    return (
        f"lower kv_cache_memory_bytes (on a CPU 1 GiB by default) or {smaller}"
        if weights < room
        else smaller
    )
