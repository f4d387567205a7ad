"""Who is there: the nodes that the cluster knows, and which of them take legs for which model. Changes none of them."""

from __future__ import annotations

from collections.abc import Collection

from router.nodes.node import Node, NodeKind
from wire.config import Role
from wire.errors import NoNode

__all__ = ["Roster"]


class Roster:
    """What can be asked of the nodes. Who changes one, or the list, calls `_changed`."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        """A new list with every change, so that who goes through one may wait meanwhile."""
        self._by_url: dict[str, Node] = {}
        self._foreign = False  # a node of another kind than ours was seen
        self._ups: dict[tuple[Role, str, NodeKind | None], list[Node]] = {}
        self._bases: dict[str, str] = {}

    def find(self, url: str) -> Node | None:
        """The wanted node at this address."""
        return self._by_url.get(url.rstrip("/"))

    def up(
        self, role: Role, exclude: Collection[Node] = (), model: str = "", kind: NodeKind | None = None
    ) -> list[Node]:
        """The nodes of a role that take legs now, for this model or adapter; empty stands for whatever is served.

        Of any kind if none is named. The list is not the caller's to change.
        """
        key = (role, model, kind)
        up = self._ups.get(key)
        if up is None:
            base = self.base_of(model)
            up = [
                node for node in self.nodes if node.role == role and node.up and (not model or node.serves(base, model))
            ]
            if self._foreign and kind:
                up = [node for node in up if node.kind is kind]
            if up:
                self._ups[key] = up
        return [node for node in up if node not in exclude] if exclude else up

    def node_kinds(self, model: str = "") -> list[NodeKind]:
        """Those of which nodes of both roles are up for this model or adapter."""
        there = [{node.kind for node in self.up(role, model=model)} for role in (Role.PREFILL, Role.DECODE)]
        return [kind for kind in NodeKind if all(kind in of_role for of_role in there)]

    def base_of(self, name: str) -> str:
        """The model that a name stands for: itself, or that of an adapter; empty if no node has reported either.

        An adapter's name that nodes of several models have means one of them only, so that both legs agree.
        """
        base = self._bases.get(name)
        if base is None:
            if not name or any(node.model == name for node in self.nodes):
                base = name
            else:
                base = min((node.model for node in self._holders() if name in node.adapters), default="")
            if base:  # else clients could name as many as they like
                self._bases[name] = base
        return base

    def _changed(self) -> None:
        """Which nodes take which legs may be otherwise now."""
        self._ups.clear()
        self._bases.clear()

    def require_ready(self, model: str = "") -> None:
        """Raise NoNode unless a request for this model or adapter could walk through both of its legs now."""
        for role in (Role.PREFILL, Role.DECODE):
            if not self.up(role, model=model):
                raise self.no_node(role, model)
        if self._foreign and not self.node_kinds(model):
            raise self.no_node(Role.DECODE, model)

    def models(self) -> dict[str, int]:
        """The models of all nodes, down ones too, and the longest context in tokens that each node of one can take:
        what those say that were up once, 0 if none was."""
        known: dict[str, int] = {}
        for node in self.nodes:
            if node.model:
                told = [each for each in (node.max_model_len, known.get(node.model, 0)) if each]
                known[node.model] = min(told, default=0)
        return known

    def adapters(self) -> dict[str, str]:
        """Names of adapters that a node has, and the model that each is for."""
        return {name: self.base_of(name) for node in self._holders() for name in node.adapters}

    def _holders(self) -> list[Node]:
        """Whose word on adapters counts: that of nodes that are down only if none is up."""
        return [node for node in self.nodes if node.up] or self.nodes

    def no_node(self, role: Role, model: str = "") -> NoNode:
        """Why no leg of this role can be sent."""
        if self.up(role, model=model):
            found = (f"{node.role} node {node.url}: {node.kind}" for node in self.nodes if node.up)
            return NoNode(f"no {role} node that is up is of a prefill node's kind ({', '.join(found)})")
        if model and self.up(role):
            return NoNode(
                f"no {role} node that is up has {model!r}; load it there too, or look at the router's /health"
            )
        listed = sum(node.role == role for node in self.nodes)
        return NoNode(f"no {role} node is up ({listed} listed); try again, or look at the router's /health")
