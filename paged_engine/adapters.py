"""LoRA adapters of an engine: read at start or beside the steps, put into slots, taken out.

A retired adapter keeps its slot until its last request is done, so one slot is spare where adapters
load at run time. A thread of each rank reads files; an adapter is in a slot on every rank or on
none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import torch

from kvrelay.paged_engine.lora_files import Adapter, Matrices, read_adapter
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.model_tensors import weight_shapes
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.request import Request, State
from kvrelay.paged_engine.sharding import shard_weights
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import AdapterFacts
from kvrelay.wire.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.paged_engine.cpu_operations import CpuAdapters
    from kvrelay.paged_engine.gpu_operations import GpuAdapters

__all__ = [
    "ABOUT_ADAPTERS",
    "AdapterReader",
    "AdapterSlots",
    "AdapterStore",
    "Adapters",
    "FollowerAdapters",
    "Loaded",
    "Reading",
    "Site",
    "shard_adapter",
    "adapter_sites",
    "slots_in_use",
    "num_slots",
    "stack_sites",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    slot: int
    facts: AdapterFacts

    @property
    def identity(self) -> str:
        """Return name and digest: what its KV is hashed with."""
        return f"{self.facts.name}@{self.facts.digest}"


class AdapterSlots:
    """A table of which adapter is in which slot; at most `limit` are loaded."""

    def __init__(self, limit: int, slots: int) -> None:
        self.limit = limit
        self._free = list(reversed(range(slots)))
        self._loading: dict[int, str] = {}
        self._named: dict[str, Loaded] = {}
        self._ending: set[int] = set()

    @property
    def loaded(self) -> list[AdapterFacts]:
        return [loaded.facts for loaded in self._named.values()]

    def named(self, name: str) -> Loaded | None:
        return self._named.get(name)

    def reserve(self, name: str, *, in_place: bool) -> int:
        """Return a slot for an adapter to be read. Raises ValueError if there is none."""
        if name in self._loading.values():
            raise ValueError(f"adapter {name!r} is being loaded already; wait for that")
        if name in self._named and not in_place:
            raise ValueError(
                f"adapter {name!r} is loaded already; unload it first, or set load_inplace"
            )
        if len({*self._named, *self._loading.values(), name}) > self.limit:
            raise ValueError(
                f"{len(self._named) + len(self._loading)} adapters are loaded and max_loras is "
                f"{self.limit}; unload one or start the node with more"
            )
        if not self._free:
            raise ValueError(
                "requests of an adapter that was unloaded still run in the last slot; try again"
            )
        slot = self._free.pop()
        self._loading[slot] = name
        return slot

    def fill(self, slot: int, facts: AdapterFacts) -> None:
        del self._loading[slot]
        self.retire(facts.name)
        self._named[facts.name] = Loaded(slot, facts)

    def cancel(self, slot: int) -> None:
        del self._loading[slot]
        self._free.append(slot)

    def retire(self, name: str) -> None:
        """Let no request begin with this adapter any more."""
        loaded = self._named.pop(name, None)
        if loaded is not None:
            self._ending.add(loaded.slot)

    @property
    def ending(self) -> bool:
        return bool(self._ending)

    def free_unused(self, used: Collection[int]) -> list[int]:
        freed = sorted(self._ending.difference(used))
        self._ending.difference_update(freed)
        self._free += freed
        return freed


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


def adapter_sites(model: ModelConfig) -> list[dict[str, Site]]:
    """Return each layer's sites by the names of `Decoder.sites`; experts have none."""
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


def shard_adapter(adapter: Adapter, model: ModelConfig, rank: int, size: int) -> Adapter:
    """Return a rank's share: B's rows for its outputs, A's columns for its inputs."""

    def cut(module: str, matrix: torch.Tensor) -> torch.Tensor:
        ((_, part),) = shard_weights([(f"{module}.weight", matrix)], model, rank, size)
        return part

    def matrices(module: str, a: torch.Tensor, b: torch.Tensor) -> Matrices:
        return (cut(module, a), b) if module.endswith(_CUT_INPUTS) else (a, cut(module, b))

    return replace(
        adapter,
        modules={module: matrices(module, *both) for module, both in adapter.modules.items()},
    )


def stack_sites(
    adapter: Adapter, layers: Sequence[Mapping[str, Site]], rank: int, dtype: torch.dtype
) -> list[dict[str, Matrices]]:
    """Return each layer's adapted sites: A [projections * rank, in] and B [outputs, rank].

    Lower ranks are padded with zeros; B's rows for projection i belong to A's i-th `rank` rows.
    """
    return [
        {
            name: _stacked(adapter.modules, site, rank, dtype)
            for name, site in sites.items()
            if any(module in adapter.modules for module in site.modules)
        }
        for sites in layers
    ]


def _stacked(
    modules: Mapping[str, Matrices], site: Site, rank: int, dtype: torch.dtype
) -> Matrices:
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


AdapterStore: TypeAlias = "CpuAdapters | GpuAdapters"
"""A rank's slots on its device."""
# Before rank 0's messages about adapters; see `_ASIDE` in paged_engine/engine.py.
ABOUT_ADAPTERS = b"\xc1\xc1"


class _Message(msgspec.Struct, frozen=True, array_like=True):
    verb: Literal["read", "install", "remove"]
    slot: int
    detail: str = ""  # read: the path; install: the digest, empty if rank 0 failed


def num_slots(config: EngineConfig) -> int:
    """Return the slots on the device, one to spare for loading."""
    return config.adapter_slots + config.allow_runtime_lora


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """A reader for one rank; `model` is the whole model."""

    model: ModelConfig
    dtype: torch.dtype
    max_rank: int
    ranks: Ranks

    def read(self, path: str) -> Adapter:
        whole = read_adapter(path, self.model, self.max_rank, self.dtype)
        return shard_adapter(whole, self.model, self.ranks.rank, self.ranks.size)

    def given(self, config: EngineConfig) -> list[Adapter]:
        """Read the adapters named at start. Raises ConfigError, also if ranks differ."""
        adapters = [self.read(path) for _, path in config.adapters]
        if adapters:
            self.ranks.require_equal(
                {
                    f"lora_modules {text}": each.digest
                    for text, each in zip(config.lora_modules, adapters, strict=True)
                }
            )
        return adapters


@dataclass(slots=True)
class Reading:
    name: str
    slot: int
    done: Callable[[], None] | None = None
    thread: threading.Thread | None = None
    facts: AdapterFacts | None = None
    prepared: Any = None
    failure: str = "reading it broke; the log of this node says how"

    def begin(self, path: str, reader: AdapterReader, store: AdapterStore) -> None:
        self.thread = threading.Thread(
            target=self._read, args=(path, reader, store), name=f"adapter-{self.slot}", daemon=True
        )
        self.thread.start()

    def _read(self, path: str, reader: AdapterReader, store: AdapterStore) -> None:
        try:
            adapter = reader.read(path)
            self.prepared = store.prepare(adapter)
            self.facts = AdapterFacts(self.name, adapter.digest, adapter.rank)
        except ConfigError as why:
            self.failure = why.message
        finally:
            if self.done is not None:
                self.done()

    @property
    def digest(self) -> str:
        assert self.thread is not None
        self.thread.join()
        return "" if self.facts is None else self.facts.digest


class Adapters:
    """A holder of rank 0's adapters, for the thread that steps."""

    def __init__(
        self,
        config: EngineConfig,
        reader: AdapterReader,
        store: AdapterStore,
        given: Sequence[Adapter],
    ) -> None:
        self._reader, self._store, self._ranks = reader, store, reader.ranks
        self.slots = AdapterSlots(config.adapter_slots, num_slots(config))
        for slot, ((name, _), adapter) in enumerate(zip(config.adapters, given, strict=True)):
            assert self.slots.reserve(name, in_place=False) == slot
            self.slots.fill(slot, AdapterFacts(name, adapter.digest, adapter.rank))
        _install_given(store, given)

    def begin(self, name: str, path: str, *, in_place: bool, done: Callable[[], None]) -> Reading:
        """Begin to read an adapter; `done` is called from a thread when `finish` is due.

        Raises ValueError if there is no slot for it.
        """
        reading = Reading(name, self.slots.reserve(name, in_place=in_place), done)
        self._broadcast(_Message("read", reading.slot, path))
        reading.begin(path, self._reader, self._store)
        return reading

    def finish(self, reading: Reading) -> AdapterFacts:
        """Install what was read. Raises ConfigError if a rank has not read the same."""
        digest = reading.digest
        self._broadcast(_Message("install", reading.slot, digest))
        if not self._ranks.minimum(int(bool(digest))):
            self.slots.cancel(reading.slot)
            raise ConfigError(
                "another rank has not read the same adapter there; see its log"
                if digest
                else reading.failure
            )
        assert reading.facts is not None
        self._store.install(reading.slot, reading.prepared)
        self.slots.fill(reading.slot, reading.facts)
        return reading.facts

    def remove_unused(self, live: Iterable[Request]) -> None:
        if not self.slots.ending:
            return
        for slot in self.slots.free_unused(set.union(*slots_in_use(live))):
            self._broadcast(_Message("remove", slot))
            self._store.remove(slot)

    def _broadcast(self, message: _Message) -> None:
        if self._ranks.size > 1:
            self._ranks.broadcast(ABOUT_ADAPTERS + msgspec.msgpack.encode(message))


class FollowerAdapters:
    def __init__(
        self, reader: AdapterReader, store: AdapterStore, given: Sequence[Adapter]
    ) -> None:
        self._reader, self._store = reader, store
        _install_given(store, given)
        self._readings: dict[int, Reading] = {}

    def on_message(self, message: bytes) -> None:
        todo = msgspec.msgpack.decode(message.removeprefix(ABOUT_ADAPTERS), type=_Message)
        slot = todo.slot
        if todo.verb == "read":
            reading = self._readings[slot] = Reading("", slot)
            reading.begin(todo.detail, self._reader, self._store)
        elif todo.verb == "install":
            reading = self._readings.pop(slot)
            same = bool(todo.detail) and reading.digest == todo.detail
            if self._reader.ranks.minimum(int(same)):
                self._store.install(slot, reading.prepared)
        else:
            self._store.remove(slot)


def slots_in_use(requests: Iterable[Request]) -> tuple[set[int], set[int]]:
    """Return the slots of running or fetching requests, and those of waiting ones."""
    running: set[int] = set()
    waiting: set[int] = set()
    for request in requests:
        if request.adapter is not None:
            (waiting if request.state is State.WAITING else running).add(request.adapter.slot)
    return running, waiting


def _install_given(store: AdapterStore, given: Sequence[Adapter]) -> None:
    for slot, adapter in enumerate(given):
        prepared: Any = store.prepare(adapter)
        store.install(slot, prepared)
