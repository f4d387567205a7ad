"""LoRA adapters of an engine: read at start or between two steps, put into slots, taken out.

A retired adapter keeps its slot until its last request is done: one slot is spare where adapters
load at run time. An adapter is in a slot on every rank or none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from kvrelay.paged_engine.lora_files import Adapter, Matrices, read_adapter
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import weight_shapes
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.request import Request
from kvrelay.paged_engine.sharding import shard
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import AdapterAnswer, AdapterFacts, LoadAdapter
from kvrelay.wire.errors import ConfigError

__all__ = [
    "ABOUT_ADAPTERS",
    "AdapterStore",
    "Adapters",
    "Loaded",
    "Site",
    "answer_load",
    "num_slots",
    "read_given",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    slot: int
    facts: AdapterFacts

    @property
    def identity(self) -> str:
        return f"{self.facts.name}@{self.facts.digest}"


_SITES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Projections whose inputs are cut among ranks, and so A; else B.
_CUT_INPUTS = (".o_proj", ".down_proj")


@dataclass(frozen=True, slots=True)
class Site:
    """A linear layer of the decoder, with the outputs of each of its projections in `rows`.

    Projections share their input, so their A's are stacked, and their B's too.
    """

    modules: tuple[str, ...]
    in_features: int
    rows: tuple[int, ...]


def _sites_of(model: ModelConfig) -> list[dict[str, Site]]:
    shapes = weight_shapes(replace(model, quantization=None))
    layers = []
    for index in range(model.num_layers):
        sites = {}
        for name, projections in _SITES.items():
            modules = [f"model.layers.{index}.{projection}" for projection in projections]
            modules = [module for module in modules if f"{module}.weight" in shapes]
            if modules:
                sizes = [shapes[f"{module}.weight"] for module in modules]
                sites[name] = Site(tuple(modules), sizes[0][1], tuple(size[0] for size in sizes))
        layers.append(sites)
    return layers


def _share(adapter: Adapter, model: ModelConfig, rank: int, size: int) -> Adapter:
    """Return a rank's share: B's rows for its outputs, A's columns for its inputs."""

    def matrices(module: str, a: torch.Tensor, b: torch.Tensor) -> Matrices:
        whole = a if module.endswith(_CUT_INPUTS) else b
        part = shard(f"{module}.weight", whole, model, rank, size)
        return (part, b) if whole is a else (a, part)

    return replace(
        adapter,
        modules={module: matrices(module, *both) for module, both in adapter.modules.items()},
    )


def _stacked(
    modules: Mapping[str, Matrices], site: Site, rank: int, dtype: torch.dtype
) -> Matrices | None:
    """Return A [projections * rank, in] and B [outputs, rank]; None where nothing is adapted.

    Lower ranks are padded with zeros; projection i has A's i-th `rank` rows.
    """
    if not any(module in modules for module in site.modules):
        return None
    a = torch.zeros(len(site.modules) * rank, site.in_features, dtype=dtype)
    b = torch.zeros(sum(site.rows), rank, dtype=dtype)
    for index, (module, ours) in enumerate(
        zip(site.modules, torch.split(b, list(site.rows)), strict=True)
    ):
        if module in modules:
            down, up = modules[module]
            a[index * rank : index * rank + len(down)] = down
            ours[:, : len(down)] = up
    return a, b


class AdapterStore:
    """A rank's slots on its device; `linears` are `Decoder.sites`."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        linears: Sequence[Mapping[str, Any]],
        dtype: torch.dtype,
        rank_multiple: int = 1,
    ) -> None:
        """Allocate the slots. Raise ConfigError where a CPU's products are not batch-invariant."""
        self._rank = -(-config.max_lora_rank // rank_multiple) * rank_multiple
        self._dtype = dtype
        self._sites = [
            (site, layer[name])
            for sites, layer in zip(_sites_of(model), linears, strict=True)
            for name, site in sites.items()
        ]
        for site, linear in self._sites:
            linear.make_room(site, num_slots(config), self._rank, dtype)

    def prepare(self, adapter: Adapter) -> list[Any]:
        """Return this rank's share in host memory, as `install` takes it."""
        stacked = (
            _stacked(adapter.modules, site, self._rank, self._dtype) for site, _ in self._sites
        )
        return [
            each and linear.prepare(*each)
            for each, (_, linear) in zip(stacked, self._sites, strict=True)
        ]

    def install(self, slot: int, prepared: Sequence[Any]) -> None:
        """Put it into an unused slot, behind the steps so far."""
        for each, (_, linear) in zip(prepared, self._sites, strict=True):
            linear.put(slot, each)


# Before rank 0's messages about adapters; see `_ASIDE` in paged_engine/engine.py.
ABOUT_ADAPTERS = b"\xc1\xc1"


def num_slots(config: EngineConfig) -> int:
    """Return the slots on the device, one to spare for loading."""
    return config.adapter_slots + config.allow_runtime_lora


def read_given(config: EngineConfig, model: ModelConfig, ranks: Ranks) -> list[Adapter]:
    """Read the adapters named at start. Raises ConfigError, also if ranks differ."""
    given = [read_adapter(path, model, config.max_lora_rank) for _, path in config.adapters]
    named = zip(config.lora_modules, given, strict=True)
    if given:
        ranks.require_equal({f"lora_modules {text}": each.digest for text, each in named})
    return given


class Adapters:
    """A table of a rank's adapters; rank 0's `load` reads a folder on all of them."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        ranks: Ranks,
        store: AdapterStore,
        given: Sequence[Adapter],
    ) -> None:
        self._model, self._ranks, self._store = model, ranks, store
        self._limit, self._max_rank = config.adapter_slots, config.max_lora_rank
        self._free = list(reversed(range(num_slots(config))))
        self._named: dict[str, Loaded] = {}
        self._ending: set[int] = set()
        for (name, _), adapter in zip(config.adapters, given, strict=True):
            self._install(self._free.pop(), name, adapter, self._prepare(adapter))

    @property
    def loaded(self) -> list[AdapterFacts]:
        return [loaded.facts for loaded in self._named.values()]

    def named(self, name: str) -> Loaded | None:
        return self._named.get(name)

    def load(self, name: str, path: str, *, in_place: bool) -> AdapterFacts:
        """Read an adapter on all ranks; steps wait. Raises ConfigError."""
        if name in self._named and not in_place:
            raise ConfigError(
                f"adapter {name!r} is loaded already; unload it first, or set load_inplace"
            )
        if len({*self._named, name}) > self._limit:
            raise ConfigError(
                f"{len(self._named)} adapters are loaded and max_loras is {self._limit}; unload "
                "one or start the node with more"
            )
        if not self._free:
            raise ConfigError(
                "requests of an adapter that was unloaded still run in the last slot; try again"
            )
        slot = self._free[-1]
        self._ranks.broadcast(ABOUT_ADAPTERS + msgspec.msgpack.encode((slot, name, path)))
        self._read(slot, name, path)
        self._free.pop()
        return self._named[name].facts

    def follow(self, message: bytes) -> None:
        slot, name, path = msgspec.msgpack.decode(
            message.removeprefix(ABOUT_ADAPTERS), type=tuple[int, str, str]
        )
        with contextlib.suppress(ConfigError):
            self._read(slot, name, path)

    def _read(self, slot: int, name: str, path: str) -> None:
        failure: ConfigError | None = None
        digest = ""
        try:
            adapter = read_adapter(path, self._model, self._max_rank)
            prepared = self._prepare(adapter)
            digest = adapter.digest
        except ConfigError as why:
            failure = why
        except (MemoryError, RuntimeError) as why:  # also RecursionError
            failure = ConfigError(f"adapter {path} cannot be read: {why!r}")
        try:
            self._ranks.require_equal({f"adapter {path}": digest})
        except ConfigError as why:
            failure = failure or why
        if failure is not None:
            raise failure
        self._install(slot, name, adapter, prepared)

    def _prepare(self, adapter: Adapter) -> list[Any]:
        share = _share(adapter, self._model, self._ranks.rank, self._ranks.size)
        return self._store.prepare(share)

    def _install(self, slot: int, name: str, adapter: Adapter, prepared: Sequence[Any]) -> None:
        self._store.install(slot, prepared)
        self.retire(name)
        self._named[name] = Loaded(slot, AdapterFacts(name, adapter.digest, adapter.rank))

    def retire(self, name: str) -> None:
        loaded = self._named.pop(name, None)
        if loaded is not None:
            self._ending.add(loaded.slot)

    def free_unused(self, live: Iterable[Request]) -> None:
        if self._ending:
            used = {each.adapter.slot for each in live if each.adapter is not None}
            freed = self._ending - used
            self._ending -= freed
            self._free += freed


def answer_load(adapters: Adapters | None, asked: LoadAdapter) -> AdapterAnswer:
    if adapters is None:
        reason = "this node has no slots for adapters; start it with --max-loras"
    else:
        try:
            facts = adapters.load(asked.name, asked.path, in_place=asked.in_place)
            return AdapterAnswer(asked.number, facts)
        except ConfigError as why:
            reason = why.message
    # Not Path.is_dir, which raises on names that are too long.
    return AdapterAnswer(asked.number, reason=reason, missing=not os.path.isdir(asked.path))
