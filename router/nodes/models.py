"""The names that requests may ask for: models, adapters, and aliases of both.

An alias is resolved at once: nodes see the name that they serve, and the answer's `model` is it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.openai_api.model_types import ModelCard
from kvrelay.router.nodes.node import NodeKind
from kvrelay.router.nodes.pool import Pool
from kvrelay.wire.config import Role
from kvrelay.wire.errors import NoNode, NotFound

__all__ = ["Models"]


class Models:
    def __init__(self, pool: Pool, aliases: Mapping[str, str], created: int) -> None:
        self._pool = pool
        self.aliases = aliases
        self._created = created

    def named(self, name: str) -> str:
        """Return the model or adapter that a name means. Raises NotFound, NoNode."""
        meant = self.aliases.get(name, name)
        if self._pool.base_of(meant):
            return meant
        served = self.names()
        if not served:
            raise NoNode(
                "no node has reported its model yet; try again, or look at the router's /health"
            )
        if name in self.aliases:
            raise NoNode(
                f"{name!r} stands for {meant!r}, and no node has reported it; look at the "
                f"router's /health"
            )
        raise NotFound(
            f"model {name!r} is not served here; served: {', '.join(map(repr, served))}",
            param="model",
            code="model_not_found",
        )

    def names(self) -> list[str]:
        return [card.id for card in self.cards()]

    def cards(self) -> list[ModelCard]:
        known = self._pool.models()
        cards = {
            name: ModelCard.create(name, self._created, longest)
            for name, longest in sorted(known.items())
        }
        for name, parent in sorted(self._pool.adapters().items()):
            if name not in cards:
                cards[name] = cards[parent].named(name, parent=parent)
        for alias, meant in sorted(self.aliases.items()):
            if meant in cards:
                cards[alias] = cards[meant].named(alias, root=meant)
        return list(cards.values())

    def ready(self) -> dict[str, bool]:
        return {name: bool(self._pool.node_kinds(name)) for name in sorted(self._pool.models())}

    def alone(self) -> bool:
        return any(
            node.kv is not None and node.kv.computes_prompts
            for node in self._pool.up(Role.DECODE, kind=NodeKind.KVRELAY)
        )
