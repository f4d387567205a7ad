"""Members of the cluster, by what each source of membership says. Pure.

Level-triggered: a source gives its whole list, as often as it likes, and a lost message is mended
by the next one. A node stays for as long as any source names it. Health is router/nodes/pool.py's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.wire.config import Role
from kvrelay.wire.config_checks import MAX_URL_CHARS, is_base_url
from kvrelay.wire.errors import RequestError

__all__ = ["Change", "Members", "NodeSpec", "Source", "static_nodes"]


class Source(enum.StrEnum):
    """A source of membership. Where two disagree about a role, the first of these counts."""

    ADMIN = "admin"
    STATIC = "static"
    KUBERNETES = "kubernetes"
    HEARTBEATS = "heartbeats"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node that a source names. Raises RequestError for a bad address or role.

    `model`: if the source knows it; what the node itself says counts. `generation`: the source's
    own name for the process behind the address, or its pod.
    """

    url: str
    role: Role
    model: str = ""
    generation: str = ""

    def __post_init__(self) -> None:
        if not is_base_url(self.url):
            raise RequestError(
                f"node address {self.url[:MAX_URL_CHARS]!r} must be http:// or https://, a host "
                f"and a port, within {MAX_URL_CHARS} characters",
                param="url",
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))
        if self.role not in (Role.PREFILL, Role.DECODE):
            raise RequestError(f"role must be prefill or decode, got {self.role}", param="role")


def static_nodes(prefill: Iterable[str], decode: Iterable[str]) -> list[NodeSpec]:
    """Return the nodes that a configuration lists. Raises RequestError."""
    return [
        *(NodeSpec(url, Role.PREFILL) for url in prefill),
        *(NodeSpec(url, Role.DECODE) for url in decode),
    ]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the wanted nodes, by what a source has said."""

    joined: tuple[NodeSpec, ...] = ()
    left: tuple[str, ...] = ()
    replaced: tuple[NodeSpec, ...] = ()
    """Nodes with another process at the same address."""
    relisted: tuple[NodeSpec, ...] = ()
    """Nodes that are named with another role."""


class Members:
    """A record of what all sources say."""

    def __init__(self) -> None:
        self.by_source: dict[Source, dict[str, NodeSpec]] = {source: {} for source in Source}
        """The nodes that each source names, by their addresses."""

    def update(self, source: Source, specs: Iterable[NodeSpec]) -> Change:
        """Take over the nodes that the source names now, and return what changes."""
        before, was = self._wanted(), self.by_source[source]
        self.by_source[source] = {spec.url: spec for spec in specs}
        after = self._wanted()
        same = before.keys() & after.keys()
        return Change(
            joined=tuple(spec for url, spec in after.items() if url not in same),
            left=tuple(url for url in before if url not in same),
            replaced=tuple(
                spec
                for url, spec in self.by_source[source].items()
                if url in was and _is_replaced(was[url], spec)
            ),
            relisted=tuple(after[url] for url in same if before[url].role is not after[url].role),
        )

    def listed(self, url: str) -> NodeSpec | None:
        """Return what the first source says of a node, if any names it."""
        return next((specs[url] for specs in self.by_source.values() if url in specs), None)

    def sources(self, url: str) -> list[Source]:
        """Return the sources that name this node."""
        return [source for source, specs in self.by_source.items() if url in specs]

    def _wanted(self) -> dict[str, NodeSpec]:
        wanted: dict[str, NodeSpec] = {}
        for specs in self.by_source.values():  # in the order of Source
            for url, spec in specs.items():
                wanted.setdefault(url, spec)
        return wanted


def _is_replaced(was: NodeSpec, now: NodeSpec) -> bool:
    return bool(was.generation and now.generation) and was.generation != now.generation
