"""Checks before a process starts or memory is taken: settings, model, files and memory of this
machine.

Never imports torch, so that a wrong setting is answered at once.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import TypeVar

from kvrelay.cluster_plan import ClusterConfig, NodeGpus, gpus_of_nodes, sharing_memory
from kvrelay.machine import Gpu, gpus_here
from kvrelay.wire.config import EngineConfig, NodeConfig, RanksConfig
from kvrelay.wire.config_checks import gib, require
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = [
    "Host",
    "Memory",
    "NotNow",
    "check_memory",
    "check_start",
    "host",
    "memory_here",
    "with_model_here",
]

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
    whose: str
    total: int
    free: int


def memory_here(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> list[Memory]:
    """Return what the machine and each cgroup of this process allow, swap left out.

    Empty on systems other than Linux.
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
    """Raise ConfigError if engines do not fit; NotNow if only what else runs here is in the way.

    `weights` and `pools` are bytes of all engines together.
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
                f"end what else runs there, or {_lower(each.free, weights, smaller)}"
            )


def _lower(room: int, weights: int, smaller: str) -> str:
    return (
        f"lower kv_cache_memory_bytes (on a CPU 1 GiB by default) or {smaller}"
        if weights < room
        else smaller
    )


Config = TypeVar("Config", NodeConfig, RanksConfig, ClusterConfig)


@dataclass(frozen=True, slots=True)
class Host:
    gpus: tuple[Gpu, ...] | None
    """None: torch can use none here. Empty: unknown."""
    memory: Sequence[Memory]


def host() -> Host:
    """Look at this machine."""
    return Host(gpus_here(), memory_here())


def with_model_here(config: Config) -> Config:
    """Check that the config can be served here, and replace its model by a path.

    Downloads a model of the Hub, as the last thing, so that no child needs a token. Raises
    ConfigError.
    """
    from kvrelay.paged_engine.hub import resolve_model
    from kvrelay.paged_engine.prefetch import PrefetchFailed, model_files

    here, engine = host(), _node_of(config).engine

    def at(model: str) -> Config:
        found = replace(engine, model=model, revision="", hf_token="")
        if isinstance(config, ClusterConfig):
            return replace(config, node=replace(config.node, engine=found))
        return replace(config, engine=found)

    path = resolve_model(engine, lambda checked: check_start(at(checked.model), here))
    found = at(str(path))
    try:
        check_start(found, here)
        model_files(path, _node_of(found).engine, tokenizer=not isinstance(config, RanksConfig))
    except PrefetchFailed as why:
        raise ConfigError(why.message) from why
    except OSError as why:  # nobody lets us look into the folder
        raise ConfigError(f"model {engine.model!r} cannot be read: {why}") from why
    return found


def check_start(config: NodeConfig | RanksConfig | ClusterConfig, here: Host) -> None:
    """Raise ConfigError if the engines of a config cannot work on this machine together.

    Of the model only config.json is read: the rest may have to be downloaded.
    """
    from kvrelay.node.serving import check_model_name, read_template
    from kvrelay.openai_api.generation_config import sampling_defaults
    from kvrelay.paged_engine.before_loading import checked_model, least_memory
    from kvrelay.paged_engine.lora_files import check_adapter
    from kvrelay.paged_engine.rank_address import is_of_this_host

    node = _node_of(config)
    engine = node.engine
    device = _device(engine, here)
    engines = _engines(config)
    models = list(
        map(
            {each: checked_model(each, device) for each in dict.fromkeys(engines)}.__getitem__,
            engines,
        )
    )
    if isinstance(node, NodeConfig):
        check_model_name(node.served_model_name or models[0].name, engine)
        read_template(node.chat_template)
        _check_plugin(node.tool_parser_plugin)
        require(
            is_of_this_host(node.transfer.kv_host),
            f"kv_host {node.transfer.kv_host!r} is no address of this machine; take one that "
            f"its peers reach",
        )
        sampling_defaults(engine)
        if node.profiler_config is not None:
            _check_profiler(node.profiler_config, device)
    for _, folder in engine.adapters:
        check_adapter(folder, engine.max_lora_rank)
    ranks = list(map(_ranks_here, engines))
    least = [least_memory(each, model, device) for each, model in zip(engines, models, strict=True)]
    if device == "cpu":
        weights, pools = (sum(map(mul, ranks, sizes)) for sizes in zip(*least, strict=True))
        check_memory(here.memory, weights, pools, len(engines))
    elif here.gpus:
        _check_gpus(
            engines, least, gpus_of_nodes(ranks, [gpu.name for gpu in here.gpus]), here.gpus
        )


def _check_plugin(path: str) -> None:
    if path:
        try:
            compile(Path(path).expanduser().read_bytes(), path, "exec")
        except (OSError, SyntaxError, ValueError) as why:
            raise ConfigError(f"the plugin {path} cannot be run: {why}") from why


def _check_profiler(profiler: ProfilerConfig, device: str) -> None:
    if profiler.profiler == "cuda":
        require(device == "cuda", "the profiler cuda needs a GPU; take torch on a CPU")
        return
    folder = Path(profiler.torch_profiler_dir)
    try:
        # A process of root may write everywhere by its rights, and not in /proc.
        with tempfile.TemporaryDirectory(
            dir=next(each for each in (folder, *folder.parents) if each.exists())
        ):
            pass
    except OSError as why:
        raise ConfigError(
            f"torch_profiler_dir {str(folder)!r} cannot be written to: {why.strerror or why}"
        ) from why


def _device(engine: EngineConfig, here: Host) -> str:
    if engine.device == "cuda" and here.gpus is None:
        raise ConfigError(
            "device cuda was asked for, but torch can use no GPU here; use --device cpu, or "
            "install a CUDA build of torch and NVIDIA's driver"
        )
    return "cpu" if engine.device == "cpu" or here.gpus is None else "cuda"


def _node_of(config: NodeConfig | RanksConfig | ClusterConfig) -> NodeConfig | RanksConfig:
    return config.node if isinstance(config, ClusterConfig) else config


def _engines(config: NodeConfig | RanksConfig | ClusterConfig) -> list[EngineConfig]:
    if not isinstance(config, ClusterConfig):
        return [config.engine]
    return [config.node_of(role).engine for role in config.roles]


def _ranks_here(engine: EngineConfig) -> int:
    return engine.tensor_parallel_size_local or engine.tensor_parallel_size


def _check_gpus(
    engines: Sequence[EngineConfig],
    least: Sequence[tuple[int, int]],
    places: Sequence[NodeGpus],
    gpus: Sequence[Gpu],
) -> None:
    from kvrelay.paged_engine.before_loading import RESERVE_BYTES

    known, needed, asked = {gpu.name: gpu for gpu in gpus}, Counter[str](), Counter[str]()
    for engine, (weights, pool), own in zip(engines, least, places, strict=True):
        share = sharing_memory(engine, own.sharers).gpu_memory_utilization
        for gpu in (known[name] for name in own.visible.split(",")):
            allowed = int(gpu.total_bytes * share)
            whole = weights + pool + RESERVE_BYTES
            limit = gpu.total_bytes if engine.kv_cache_memory_bytes else allowed
            if gpu.total_bytes and whole > limit:
                raise ConfigError(
                    f"each rank needs at least {gib(whole)} of its GPU ({gib(weights)} of weights, "
                    f"{gib(pool)} of KV pool, {gib(RESERVE_BYTES)} for graphs), and may have "
                    f"{gib(limit)} of {gib(gpu.total_bytes)}; lower kv_cache_memory_bytes or "
                    "max_model_len, use quantization fp8, or spread the model over more GPUs with "
                    "tensor_parallel_size"
                )
            needed[gpu.name] += whole
            asked[gpu.name] += allowed
    for gpu in known.values():
        if needed[gpu.name] > gpu.total_bytes > 0:
            raise ConfigError(
                f"the nodes on GPU {gpu.name} need at least {gib(needed[gpu.name])} together, and "
                f"it has {gib(gpu.total_bytes)}; lower kv_cache_memory_bytes, or start fewer nodes"
            )
        if gpu.total_bytes and asked[gpu.name] > gpu.free_bytes:
            refusal = ConfigError if asked[gpu.name] > gpu.total_bytes else NotNow
            raise refusal(
                f"gpu_memory_utilization gives {gib(asked[gpu.name])} of GPU {gpu.name} to nodes, "
                f"and only {gib(gpu.free_bytes)} of its {gib(gpu.total_bytes)} are free; lower it "
                "or end what else runs there"
            )
