"""Learns if a process has died since a leg was lost on it, by what is heard of its node later. Pure: times are given.

A connection that breaks proves nothing. A process has died if its address refuses connections, another generation
answers there, its node says that its engine is dead, or Kubernetes says that it has ended. It lives if it answers a
health check that began after the leg was lost. While its node is silent nobody knows. The end of a process that drains
is no death: it was told to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Fates"]

_Question = tuple[str, float, Callable[[bool], None]]


@dataclass(slots=True)
class _Heard:
    """The known processes at one address."""

    generation: str | None = None
    """The newest that has answered."""
    began: float = float("-inf")
    """When the newest health check began that it has answered."""
    died: str | None = None
    drains: str | None = None
    asked: list[_Question] = field(default_factory=list)


class Fates:
    """A record of the processes of all nodes, by address and generation."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def ask(self, url: str, generation: str, since: float, tell: Callable[[bool], None]) -> None:
        """Call `tell` once it is known whether this process, on which a leg was lost at `since`, has died."""
        heard = self._at(url)
        heard.asked.append((generation, since, tell))
        self._settle(heard)

    def answered(self, url: str, generation: str, began: float, *, drains: bool) -> None:
        """A health check that began then was answered by this process."""
        heard = self._at(url)
        heard.began = max(began, heard.began) if heard.generation == generation else began
        heard.generation = generation
        if heard.died == generation:  # an engine that hung, and goes on
            heard.died = None
        if drains:
            heard.drains = generation
        elif heard.drains == generation:
            heard.drains = None
        self._settle(heard)

    def drains(self, url: str, generation: str) -> None:
        """This process takes nothing new, and may end."""
        self._at(url).drains = generation

    def died(self, url: str, generation: str) -> None:
        """This process has ended, or its engine has."""
        heard = self._at(url)
        heard.died = generation
        self._settle(heard)

    def forget(self, url: str) -> None:
        """The node is gone. Who still asks is not told."""
        self._heard.pop(url, None)

    def _at(self, url: str) -> _Heard:
        return self._heard.setdefault(url, _Heard())

    @staticmethod
    def _settle(heard: _Heard) -> None:
        asked, heard.asked = heard.asked, []
        for question in asked:
            generation, since, tell = question
            died = _fate(heard, generation, since)
            if died is None:
                heard.asked.append(question)
            else:
                tell(died)


def _fate(heard: _Heard, generation: str, since: float) -> bool | None:
    if heard.drains == generation:
        return False
    if heard.died == generation or heard.generation not in (None, generation):
        return True
    return False if heard.generation == generation and heard.began >= since else None
