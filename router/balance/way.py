"""How a role gets one more node: the interface of the ways there are (flips.py, deployments.py)."""

from __future__ import annotations

from typing import Protocol

from wire.config import Role

__all__ = ["UnderWay", "Way"]


class UnderWay(Protocol):
    """A change that has begun."""

    where: str
    """The address of the node, or the names of the Deployments."""
    deadline_s: float
    """It should be over within this time."""

    async def over(self) -> str | None:
        """None: not yet. Empty: it is done. Else why it never will be."""
        ...

    async def give_up(self) -> None:
        """The deadline has passed: nobody waits for it any more."""
        ...


class Way(Protocol):
    """See the module."""

    async def hindered(self, model: str) -> str:
        """Why nothing of this model can change now, as that something does already, by whomever; empty: it can."""
        ...

    async def begin(self, model: str, role: Role) -> UnderWay:
        """Have one node more take this role. Raises KvrelayError."""
        ...
