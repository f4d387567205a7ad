"""How much memory there is, on every kind of machine, and what does not fit into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.preflight import Memory, NotNow, check_memory, memory_here
from kvrelay.wire.errors import ConfigError

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


def machine(
    folder: Path, cgroup: str, limits: dict[str, dict[str, object]], total: int = 64
) -> list[Memory]:
    """What is found on a machine with so many GiB, a /proc/self/cgroup and these files of cgroups."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text(
        f"MemTotal: {total << 20} kB\nMemFree: 1 kB\nMemAvailable: {(total - 4) << 20} "
        f"kB\nSwapFree: {99 << 20} kB\n"
    )
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    for path, files in limits.items():
        (folder / "cgroup" / path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / "cgroup" / path / name).write_text(f"{content}\n")
    return memory_here(folder / "proc", folder / "cgroup")


def v2(limit: object, used: int = 0, cache: int = 0) -> dict[str, object]:
    """The files of a cgroup, of which so much is used, `cache` of it by files that the kernel can
    drop.
    """
    stat = f"anon 5\nfile 7\ninactive_file {cache // 2}\nactive_file {cache // 2}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def v1(limit: int, used: int = 0, cache: int = 0) -> dict[str, object]:
    """The same in the older version."""
    stat = f"cache 7\ninactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


MACHINE = Memory("this machine", 64 * GIB, 60 * GIB)


@pytest.mark.parametrize(
    ("cgroup", "limits", "found"),
    [
        pytest.param("", {}, [], id="no cgroups"),
        pytest.param("0::/\n", {"": {"cgroup.procs": ""}}, [], id="the root has no limit"),
        pytest.param(
            "0::/a.slice/b.scope\n",
            {"a.slice/b.scope": v2("max"), "a.slice": v2(8 * GIB, 5 * GIB, 2 * GIB)},
            [Memory("the cgroup /a.slice", 8 * GIB, 5 * GIB)],
            id="v2, the one around it",
        ),
        pytest.param(
            "0::/a/b\n",
            {"a/b": v2(4 * GIB, 6 * GIB), "a": v2(8 * GIB)},
            [Memory("the cgroup /a/b", 4 * GIB, 0), Memory("the cgroup /a", 8 * GIB, 8 * GIB)],
            id="v2, nested",
        ),
        pytest.param(
            "0::/\n",
            {"": v2(2 * GIB)},
            [Memory("the cgroup /", 2 * GIB, 2 * GIB)],
            id="v2, a container",
        ),
        pytest.param(
            "0::/docker/of-the-host\n",
            {"": v2(2 * GIB)},
            [Memory("the cgroup /", 2 * GIB, 2 * GIB)],
            id="v2, a container that sees its host's path",
        ),
        pytest.param(
            "9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n",
            {
                "memory/job/7": v1(3 * GIB, 2 * GIB, GIB),
                "memory/job": v1(NO_LIMIT_V1),
                "memory": v1(NO_LIMIT_V1),
            },
            [Memory("the cgroup /job/7", 3 * GIB, 2 * GIB)],
            id="v1, hybrid",
        ),
        pytest.param(
            "nonsense\n0::/a\n", {"a": {"memory.max": "?"}}, [], id="files of another kind"
        ),
    ],
)
def test_each_cgroup_with_a_limit_is_found(
    cgroup: str, limits: dict[str, dict[str, object]], found: list[Memory], tmp_path: Path
) -> None:
    here = machine(tmp_path, cgroup, limits)
    assert here[0] == MACHINE
    assert [each for each in here[1:] if each.total < NO_LIMIT_V1] == found


def test_a_system_that_tells_nothing_has_no_limit(tmp_path: Path) -> None:
    assert memory_here(tmp_path / "proc", tmp_path) == []
    check_memory([], 1 << 60, 1 << 60, 1)


def test_this_machine_has_memory() -> None:
    assert memory_here()[0].total >= memory_here()[0].free > 0


SMALL = [Memory("this machine", 16 * GIB, 9 * GIB), Memory("the cgroup /a", 8 * GIB, 4 * GIB)]


@pytest.mark.parametrize(
    ("weights", "pools", "nodes", "refusal", "said"),
    [
        (
            1,
            4,
            1,
            NotNow,
            "the engine needs at least 5.00 GiB of memory (1.00 GiB of weights, 4.00 GiB of KV "
            "pool), and of the cgroup /a's 8.00 GiB only 4.00 GiB are free; end what else runs "
            "there, or lower kv_cache_memory_bytes",
        ),
        (
            1,
            2048,
            2,
            ConfigError,
            "2 nodes together need at least 2049.00 GiB of memory (1.00 GiB of weights, 2048.00 "
            "GiB of KV pool), and the cgroup /a has 8.00 GiB; lower kv_cache_memory_bytes (on a "
            "CPU 1 GiB by default) or take a smaller",
        ),
        (9, 1, 1, ConfigError, "and the cgroup /a has 8.00 GiB; take a smaller model"),
    ],
)
def test_what_does_not_fit_is_told_with_the_figures(
    weights: int, pools: int, nodes: int, refusal: type, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(SMALL, weights * GIB, pools * GIB, nodes)
    assert type(caught.value) is refusal
    assert said in caught.value.message


def test_what_fits_is_not_refused() -> None:
    check_memory(SMALL, GIB, 3 * GIB, 2)
    # Who only has to wait for others may try again: a supervisor starts no command again that was
    # typed wrongly.
    assert (ConfigError("x").exit_code, NotNow("x").exit_code) == (2, 1)
