"""Sources of membership, and what they say of nodes.

Level-triggered: a source gives its whole list, as often as it likes, and a lost message is mended
by the next one. A node stays for as long as any source names it (router/nodes/pool.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.wire.config import Role
from kvrelay.wire.config_checks import MAX_URL_CHARS, is_base_url
from kvrelay.wire.errors import RequestError

__all__ = ["NodeSpec", "Source", "static_nodes"]


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
    return [
        *(NodeSpec(url, Role.PREFILL) for url in prefill),
        *(NodeSpec(url, Role.DECODE) for url in decode),
    ]
