"""Which adapter is in which slot, and which slots are free. Pure.

A slot holds one adapter's matrices on the device. An adapter that is unloaded or replaced keeps its
slot until the last request that began with it is done, and takes no new ones. Where adapters are
replaced at run time there is a slot more than adapters may be loaded, so that the new one need not
wait for the old one's requests.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvrelay.wire.engine_messages import AdapterFacts

__all__ = ["AdapterSlots", "Loaded"]


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
