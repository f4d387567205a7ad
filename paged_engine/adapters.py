"""LoRA adapters of an engine: read at start or beside the steps, put into slots, taken out; on all
its ranks.

Files are read by a thread of each rank; the loop only copies what is ready. Rank 0 leads: it tells
the others to begin, and later what to do with it; all of them meet there, so that an adapter is in
a slot on every rank or on none. Owns no request: which of them use a slot is the scheduler's to
say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch

from kvrelay.paged_engine.adapter_layout import shard_adapter
from kvrelay.paged_engine.adapter_slots import AdapterSlots, Loaded
from kvrelay.paged_engine.lora_files import Adapter, read_adapter
from kvrelay.paged_engine.model_config import ModelConfig
from kvrelay.paged_engine.ranks import Ranks
from kvrelay.paged_engine.request import Request, State
from kvrelay.wire.config import EngineConfig
from kvrelay.wire.engine_messages import AdapterFacts
from kvrelay.wire.errors import ConfigError

__all__ = [
    "ABOUT_ADAPTERS",
    "AdapterReader",
    "AdapterStore",
    "Adapters",
    "FollowedAdapters",
    "Reading",
    "slots_in_use",
    "slots_of",
]

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
    """Begin to read an adapter for a slot."""

    slot: int
    path: str


class _Install(msgspec.Struct, tag="install", frozen=True):
    """Put what was read into the slot, if all ranks have read the same; an empty digest: rank 0 has
    not.
    """

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
            self.ranks.agree(
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
        if not self._ranks.least(int(bool(digest))):
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
            self._ranks.tell(ABOUT_ADAPTERS + _encoder.encode(message))


class FollowedAdapters:
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
                if self._reader.ranks.least(int(same)):
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
