"""Learns if a process has died since a leg was lost on it, by what is heard of its node later.
Pure: times are given.

A connection that breaks proves nothing. A process has died if its address refuses connections,
another generation answers there, its node says that its engine is dead, or Kubernetes says that it
has ended. It lives if it answers a health check that began after the leg was lost. While its node
is silent nobody knows. The end of a process that drains is no death: it was told to end.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

__all__ = ["Fates"]


class Fates:
    """A record of the processes at one node's address, by generation."""

    def __init__(self) -> None:
        self._generation: str | None = None
        """The newest that has answered."""
        self._began = -inf
        """When the newest health check began that it has answered."""
        self._died: str | None = None
        self._drains: str | None = None
        self._asked: list[tuple[str, float, Callable[[bool], None]]] = []

    def ask(self, generation: str, since: float, tell: Callable[[bool], None]) -> None:
        """Call `tell` once it is known whether this process, on which a leg was lost at `since`,
        has died.
        """
        self._asked.append((generation, since, tell))
        self._settle()

    def answered(self, generation: str, began: float, *, drains: bool) -> None:
        """Note that this process has answered a health check that began then."""
        self._began = max(began, self._began) if self._generation == generation else began
        self._generation = generation
        if self._died == generation:  # an engine that hung, and goes on
            self._died = None
        if drains:
            self._drains = generation
        elif self._drains == generation:
            self._drains = None
        self._settle()

    def drains(self, generation: str) -> None:
        """Note that this process takes nothing new, and may end."""
        self._drains = generation

    def died(self, generation: str) -> None:
        """Note that this process has ended, or its engine has."""
        self._died = generation
        self._settle()

    def _settle(self) -> None:
        asked, self._asked = self._asked, []
        for question in asked:
            generation, since, tell = question
            died = self._has_died(generation, since)
            if died is None:
                self._asked.append(question)
            else:
                tell(died)

    def _has_died(self, generation: str, since: float) -> bool | None:
        if self._drains == generation:
            return False
        if self._died == generation or self._generation not in (None, generation):
            return True
        return False if self._generation == generation and self._began >= since else None
