"""Checks before a process starts or memory is taken: model, files and memory of this machine.

Never imports torch, so that a wrong setting is answered at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvrelay.cluster_plan import ClusterConfig
from kvrelay.machine import gpus_here
from kvrelay.wire.config import NodeConfig, RanksConfig
from kvrelay.wire.config_checks import gib
from kvrelay.wire.errors import ConfigError

__all__ = ["check_start", "memory_here", "with_model_here"]

Config = TypeVar("Config", NodeConfig, RanksConfig, ClusterConfig)

# With 4 threads a core the embedded model's tokens take 1.4 times as long as with one, with 32 4
# times, with 128 11 times, and with 512 its engine is never ready.
_CORE_THREADS = 16


def memory_here(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int] | None:
    """Return all and free bytes of this machine or the tightest cgroup (v2), swap left out.

    None on systems other than Linux.
    """
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
        listed = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, ValueError, LookupError):
        return None
    limits = [(total, free)]
    for path in (line.removeprefix("0::/") for line in listed if line.startswith("0::/")):
        for folder in (cgroups / path, *(cgroups / path).parents[: len(Path(path).parts)]):
            with suppress(OSError, ValueError):  # not there, or "max"
                limit, used = (
                    int((folder / file).read_text()) for file in ("memory.max", "memory.current")
                )
                stat = dict(
                    row.split() for row in (folder / "memory.stat").read_text().splitlines()
                )
                cached = sum(int(stat.get(key, 0)) for key in ("inactive_file", "active_file"))
                limits.append((limit, max(0, limit - used + cached)))
    return min(limits, key=lambda each: each[1])


def _check_memory(weights: int, pools: int, nodes: int) -> None:
    needed, here = weights + pools, memory_here()
    if here is not None and needed > here[1]:
        several = f"{nodes} nodes together need" if nodes > 1 else "the engine needs"
        raise ConfigError(
            f"{several} at least {gib(needed)} of memory ({gib(weights)} of weights, {gib(pools)} "
            f"of KV pool), and of {gib(here[0])} here {gib(here[1])} are free; end what else runs, "
            "lower kv_cache_memory_bytes (on a CPU 1 GiB by default) or take a smaller model or "
            "fewer nodes"
        )


def with_model_here(config: Config) -> Config:
    """Check that the config can be served here, and replace its model by a path.

    Raises ConfigError.
    """
    from kvrelay.paged_engine.hub import model_files, resolve_model

    engine = _node_of(config).engine

    def at(model: str) -> Config:
        found = replace(engine, model=model, revision="", hf_token="")
        if isinstance(config, ClusterConfig):
            return replace(config, node=replace(config.node, engine=found))
        return replace(config, engine=found)

    try:
        path = resolve_model(engine, lambda checked: check_start(at(checked.model)))
        found = at(str(path))
        check_start(found)
        model_files(path, _node_of(found).engine, tokenizer=not isinstance(config, RanksConfig))
    except OSError as why:  # nobody lets us look into the folder
        raise ConfigError(f"model {engine.model!r} cannot be read: {why}") from why
    return found


def check_start(config: NodeConfig | RanksConfig | ClusterConfig) -> None:
    """Raise ConfigError if the engines of a config cannot work on this machine together."""
    from kvrelay.node.serving import check_model_name, read_template
    from kvrelay.openai_api.generation_config import sampling_defaults
    from kvrelay.paged_engine.before_loading import checked_model, least_memory
    from kvrelay.paged_engine.lora_files import check_adapter

    node = _node_of(config)
    engine = node.engine
    cores = len(os.sched_getaffinity(0))
    if engine.threads > _CORE_THREADS * cores:
        raise ConfigError(
            f"threads must be at most {_CORE_THREADS * cores} on {cores} cores, got "
            f"{engine.threads}; 0 takes all cores"
        )
    gpu = engine.device == "cuda" or (engine.device == "auto" and gpus_here() is not None)
    device = "cuda" if gpu else "cpu"
    engines = (
        [config.node_of(role).engine for role in config.roles]
        if isinstance(config, ClusterConfig)
        else [engine]
    )
    models = {each: checked_model(each, device) for each in set(engines)}
    if isinstance(node, NodeConfig):
        check_model_name(node.served_model_name or models[engines[0]].name, engine)
        read_template(node.chat_template)
        sampling_defaults(engine)
    for _, folder in engine.adapters:
        check_adapter(folder, engine.max_lora_rank)
    if gpu:
        return
    weights = pools = 0
    for each in engines:
        ranks = each.tensor_parallel_size_local or each.tensor_parallel_size
        weight, pool = least_memory(each, models[each], device)
        weights, pools = weights + ranks * weight, pools + ranks * pool
    if isinstance(node, NodeConfig):
        pools += len(engines) * node.cache.kv_host_memory
    _check_memory(weights, pools, len(engines))


def _node_of(config: NodeConfig | RanksConfig | ClusterConfig) -> NodeConfig | RanksConfig:
    return config.node if isinstance(config, ClusterConfig) else config
