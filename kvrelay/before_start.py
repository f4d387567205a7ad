"""Checks before a process starts or memory is taken: settings, model and files against this
machine.

Never imports torch, so that a wrong line is answered at once and no command keeps what only engines
need.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import TypeVar

from kvrelay.cluster_plan import ClusterConfig, NodeGpus, gpus_of_nodes, sharing_memory
from kvrelay.machine import Gpu, gpus_here
from kvrelay.memory import Memory, NotNow, check_memory, memory_here
from kvrelay.wire.config import EngineConfig, NodeConfig, RanksConfig
from kvrelay.wire.config_checks import gib, require
from kvrelay.wire.errors import ConfigError
from kvrelay.wire.profiler_config import ProfilerConfig

__all__ = ["Host", "check_start", "host", "with_model_here"]

Config = TypeVar("Config", NodeConfig, RanksConfig, ClusterConfig)


@dataclass(frozen=True, slots=True)
class Host:
    """A look at what this machine offers."""

    gpus: tuple[Gpu, ...] | None
    """None: torch can use none here. Empty: nobody says which there are."""
    memory: Sequence[Memory]


def host() -> Host:
    """Look at this machine."""
    return Host(gpus_here(), memory_here())


def with_model_here(config: Config) -> Config:
    """Check that the config can be served here, and make its model a path: one on the Hub is
    downloaded now, once.

    No child needs the Hub's token. Comes last, so that nothing is downloaded for what is refused.
    Raises ConfigError.
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
    """Raise ConfigError if the engines of a config cannot work on this machine, side by side.

    The files of its model beside config.json are not asked for: they may still have to be
    downloaded.
    """
    from kvrelay.node.loading import check_model_name, read_template
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
            "install a CUDA build of "
            "torch and NVIDIA's driver"
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
                    f"each rank needs at least {gib(whole)} of its GPU ({gib(weights)} of "
                    f"weights, {gib(pool)} of KV "
                    f"pool, {gib(RESERVE_BYTES)} for graphs), and may have {gib(limit)} of "
                    f"{gib(gpu.total_bytes)}; "
                    "lower kv_cache_memory_bytes or max_model_len, use quantization fp8, or "
                    "spread the model over "
                    "more GPUs with tensor_parallel_size"
                )
            needed[gpu.name] += whole
            asked[gpu.name] += allowed
    for gpu in known.values():
        if needed[gpu.name] > gpu.total_bytes > 0:
            raise ConfigError(
                f"the nodes on GPU {gpu.name} need at least {gib(needed[gpu.name])} together, and "
                f"it has "
                f"{gib(gpu.total_bytes)}; lower kv_cache_memory_bytes, or start fewer nodes"
            )
        if gpu.total_bytes and asked[gpu.name] > gpu.free_bytes:
            refusal = ConfigError if asked[gpu.name] > gpu.total_bytes else NotNow
            raise refusal(
                f"gpu_memory_utilization gives {gib(asked[gpu.name])} of GPU {gpu.name} to nodes, "
                f"and only "
                f"{gib(gpu.free_bytes)} of its {gib(gpu.total_bytes)} are free; lower it or end "
                f"what else runs there"
            )
