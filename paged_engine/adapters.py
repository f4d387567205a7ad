"""LoRA adapters of an engine: read at start or beside the steps, put into slots, taken out; on all
its ranks.

Files are read by a thread of each rank; the loop only copies what is ready. Rank 0 leads: it tells
the others to begin, and later what to do with it; all of them meet there, so that an adapter is in
a slot on every rank or on none. Owns no request: which of them use a slot is the scheduler's to
say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
    "sites_of",
    "slots_in_use",
    "slots_of",
    "stacked",
]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter in its slot."""

    slot: int
    facts: AdapterFacts

    @property
    def identity(self) -> str:
        """Of its KV: name and content."""
        return f"{self.facts.name}@{self.facts.digest}"


class AdapterSlots:
    """`limit` adapters have names at a time; there are `slots` slots for them and for those that
    are ending.
    """

    def __init__(self, limit: int, slots: int) -> None:
        self.limit = limit
        self._free = list(reversed(range(slots)))
        self._loading: dict[int, str] = {}
        self._named: dict[str, Loaded] = {}
        self._ending: set[int] = set()

    @property
    def loaded(self) -> list[AdapterFacts]:
        """The adapters that requests may name, in the order of their loading."""
        return [loaded.facts for loaded in self._named.values()]

    def named(self, name: str) -> Loaded | None:
        """The adapter of this name."""
        return self._named.get(name)

    def reserve(self, name: str, *, in_place: bool) -> int:
        """A slot for an adapter that is about to be read. Raises ValueError, with a sentence, if
        there is none.
        """
        if name in self._loading.values():
            raise ValueError(f"adapter {name!r} is being loaded already; wait for that")
        if name in self._named and not in_place:
            raise ValueError(
                f"adapter {name!r} is loaded already; unload it first, or set load_inplace"
            )
        if len({*self._named, *self._loading.values(), name}) > self.limit:
            raise ValueError(
                f"{len(self._named) + len(self._loading)} adapters are loaded and max_loras is "
                f"{self.limit}; unload "
                "one or start the node with more"
            )
        if not self._free:
            raise ValueError(
                "requests of an adapter that was unloaded still run in the last slot; try again"
            )
        slot = self._free.pop()
        self._loading[slot] = name
        return slot

    def fill(self, slot: int, facts: AdapterFacts) -> None:
        """A reserved slot has its adapter; one of the same name takes no more requests."""
        del self._loading[slot]
        self.retire(facts.name)
        self._named[facts.name] = Loaded(slot, facts)

    def give_up(self, slot: int) -> None:
        """Nothing comes into a reserved slot."""
        del self._loading[slot]
        self._free.append(slot)

    def retire(self, name: str) -> None:
        """No request begins with this adapter any more. Unknown names are ignored."""
        loaded = self._named.pop(name, None)
        if loaded is not None:
            self._ending.add(loaded.slot)

    @property
    def ending(self) -> bool:
        """Whether a slot waits for its last requests."""
        return bool(self._ending)

    def free_unused(self, used: Collection[int]) -> list[int]:
        """The slots that were waiting and that no live request uses: they are free from now on."""
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
# Of which a rank has a share of the inputs: A is cut, of all others B.
_CUT_INPUTS = (".o_proj", ".down_proj")


@dataclass(frozen=True, slots=True)
class Site:
    """One linear layer of the decoder. `modules` are the projections in it, `rows` how many outputs
    each has.
    """

    modules: tuple[str, ...]
    in_features: int
    rows: tuple[int, ...]


def sites_of(model: ModelConfig) -> list[dict[str, Site]]:
    """Of each layer: its linear layers by the names of `Decoder.sites`. A mixture's experts have
    none.
    """
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
    """What rank `rank` of `size` holds of an adapter of the whole model."""

    def cut(module: str, matrix: torch.Tensor) -> torch.Tensor:
        ((_, part),) = shard_weights([(f"{module}.weight", matrix)], model, rank, size)
        return part

    def matrices(module: str, a: torch.Tensor, b: torch.Tensor) -> Matrices:
        return (cut(module, a), b) if module.endswith(_CUT_INPUTS) else (a, cut(module, b))

    return replace(
        adapter,
        modules={module: matrices(module, *both) for module, both in adapter.modules.items()},
    )


def stacked(
    modules: Mapping[str, Matrices], site: Site, rank: int, dtype: torch.dtype
) -> Matrices | None:
    """A [projections * rank, in] and B [all outputs, rank] of a site, padded with zeros; None if it
    is not adapted.

    The rows of B that belong to projection i are for the outputs of the i-th `rank` rows of A.
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


# Before rank 0's messages about adapters; see `_ASIDE` in paged_engine/engine.py.
ABOUT_ADAPTERS = b"\xc1\xc1"


class AdapterStore(Protocol):
    """A rank's slots on its device."""

    def prepare(self, adapter: Adapter) -> Any:
        """This rank's matrices as `install` wants them. May run beside the steps, in another
        thread.
        """

    def install(self, slot: int, prepared: Any) -> None:
        """Into a slot that no request uses, before the next step."""

    def remove(self, slot: int) -> None:
        """A slot's adapter is gone."""


class _Read(msgspec.Struct, tag="read", frozen=True):
    slot: int
    path: str


class _Install(msgspec.Struct, tag="install", frozen=True):
    slot: int
    digest: str


class _Remove(msgspec.Struct, tag="remove", frozen=True):
    slot: int


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Read | _Install | _Remove] = msgspec.msgpack.Decoder(
    _Read | _Install | _Remove
)


def slots_of(config: EngineConfig) -> int:
    """Slots on the device: one more than adapters may be loaded where they can be replaced at run
    time.
    """
    return config.adapter_slots + config.allow_runtime_lora


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """What a rank needs to read an adapter. `model` is the whole model."""

    model: ModelConfig
    dtype: torch.dtype
    max_rank: int
    ranks: Ranks

    def read(self, path: str) -> Adapter:
        """This rank's share. Raises ConfigError."""
        whole = read_adapter(path, self.model, self.max_rank, self.dtype)
        return shard_adapter(whole, self.model, self.ranks.rank, self.ranks.size)

    def given(self, config: EngineConfig) -> list[Adapter]:
        """The adapters that are named at start. Raises ConfigError, also if another rank finds
        other ones.
        """
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
    """An adapter that a thread reads. `wait` gives it, once."""

    name: str
    slot: int
    thread: threading.Thread | None = None
    facts: AdapterFacts | None = None
    prepared: Any = None
    failure: str = "reading it broke; the log of this node says how"
    done: Callable[[], None] = field(default=lambda: None)

    def begin(self, path: str, reader: AdapterReader, store: AdapterStore) -> None:
        """Start the thread."""
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
        finally:  # whatever it was, whoever asked must hear of it
            self.done()

    @property
    def digest(self) -> str:
        """Of what was read, when the thread has ended; empty if that failed."""
        assert self.thread is not None
        self.thread.join()
        return "" if self.facts is None else self.facts.digest


class Adapters:
    """Rank 0's side, and that of an engine of one rank. All methods belong to the thread that
    steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        reader: AdapterReader,
        store: AdapterStore,
        given: Sequence[Adapter],
    ) -> None:
        """`given`: those that `config` names."""
        self._reader, self._store, self._ranks = reader, store, reader.ranks
        self.slots = AdapterSlots(config.adapter_slots, slots_of(config))
        for slot, ((name, _), adapter) in enumerate(zip(config.adapters, given, strict=True)):
            assert self.slots.reserve(name, in_place=False) == slot
            self.slots.fill(slot, AdapterFacts(name, adapter.digest, adapter.rank))
        _install_given(store, given)

    def named(self, name: str) -> Loaded | None:
        """The adapter of this name, if requests may begin with it."""
        return self.slots.named(name)

    def begin(self, name: str, path: str, *, in_place: bool, done: Callable[[], None]) -> Reading:
        """Begin to read an adapter; `done` is called from a thread, and then `finish` is due.

        Raises ValueError, with a sentence, if there is no slot for it.
        """
        reading = Reading(name, self.slots.reserve(name, in_place=in_place), done=done)
        self._tell(_Read(reading.slot, path))
        reading.begin(path, self._reader, self._store)
        return reading

    def finish(self, reading: Reading) -> AdapterFacts:
        """Put what was read into its slot. Raises ConfigError if a rank could not read it, or has
        read another.
        """
        digest = reading.digest
        self._tell(_Install(reading.slot, digest))
        if not self._ranks.minimum(int(bool(digest))):
            self.slots.give_up(reading.slot)
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
        """Free the slots of adapters that have ended, once no live request uses them."""
        if not self.slots.ending:
            return
        for slot in self.slots.free_unused(set.union(*slots_in_use(live))):
            self._tell(_Remove(slot))
            self._store.remove(slot)

    def _tell(self, message: _Read | _Install | _Remove) -> None:
        if self._ranks.size > 1:
            self._ranks.broadcast(ABOUT_ADAPTERS + _encoder.encode(message))


class FollowerAdapters:
    """The side of the other ranks: what `Adapters` does there, this does here."""

    def __init__(
        self, reader: AdapterReader, store: AdapterStore, given: Sequence[Adapter]
    ) -> None:
        self._reader, self._store = reader, store
        _install_given(store, given)
        self._readings: dict[int, Reading] = {}

    def heard(self, message: bytes) -> None:
        """Rank 0 has said something about adapters."""
        match _decoder.decode(message.removeprefix(ABOUT_ADAPTERS)):
            case _Read(slot, path):
                reading = self._readings[slot] = Reading("", slot)
                reading.begin(path, self._reader, self._store)
            case _Install(slot, digest):
                reading = self._readings.pop(slot)
                same = bool(digest) and reading.digest == digest
                if self._reader.ranks.minimum(int(same)):
                    self._store.install(slot, reading.prepared)
            case _Remove(slot):
                self._store.remove(slot)


def slots_in_use(requests: Iterable[Request]) -> tuple[set[int], set[int]]:
    """Slots of the adapters of requests: of those that run or fetch, and of those that wait."""
    running: set[int] = set()
    waiting: set[int] = set()
    for request in requests:
        if request.adapter is not None:
            (waiting if request.state is State.WAITING else running).add(request.adapter.slot)
    return running, waiting


def _install_given(store: AdapterStore, given: Sequence[Adapter]) -> None:
    for slot, adapter in enumerate(given):
        store.install(slot, store.prepare(adapter))
