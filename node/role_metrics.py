"""A node's metrics by the role in which each was counted, for a node whose role changes. Knows no
metric but its own.

All metrics are declared with the role that the node had at its start. Here gauges get the role that
it has now, and counts are divided: what was counted before a change stays with the role before. A
node that never flips is passed on.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from kvrelay.wire.config import Role

__all__ = ["ByRole"]

_NAME = "kvrelay_node_role"
_COUNTED = ("counter", "histogram")

_Key = tuple[str, tuple[tuple[str, str], ...]]


class ByRole(Collector):
    """What `registry` has, divided. Adds a gauge of the role to it."""

    def __init__(self, registry: CollectorRegistry, model_name: str, role: Role) -> None:
        self._registry, self._model_name, self._now = registry, model_name, role
        self._before: dict[_Key, float] = {}
        """All counts when the newest role began."""
        self._counted: dict[Role, dict[_Key, float]] = {role: {}}
        """Of each role, in its former times."""
        self._gauge = Gauge(
            _NAME,
            "1 for the role that the node has now, else 0",
            ["model_name", "role"],
            registry=registry,
        )
        self._show()

    def turn(self, role: Role) -> None:
        """From now on the node has this role."""
        counts = {
            _key(sample): sample.value
            for family in self._registry.collect()
            if family.type in _COUNTED
            for sample in family.samples
        }
        mine = self._counted[self._now]
        for key, count in counts.items():
            mine[key] = mine.get(key, 0.0) + count - self._before.get(key, 0.0)
        self._before, self._now = counts, role
        self._counted.setdefault(role, {})
        self._show()

    def collect(self) -> Iterator[Metric]:
        """For one scrape."""
        for family in self._registry.collect():
            if len(self._counted) > 1 and family.name != _NAME:
                family.samples = list(self._divided(family))
            yield family

    def _show(self) -> None:
        roles = {Role.AGGREGATED} if self._now is Role.AGGREGATED else {Role.PREFILL, Role.DECODE}
        for role in roles:
            self._gauge.labels(self._model_name, role.value).set(role is self._now)

    def _divided(self, family: Metric) -> Iterator[Sample]:
        for role, former in self._counted.items():
            for sample in family.samples:
                value: float | None = sample.value if role is self._now else None
                if family.type in _COUNTED and not sample.name.endswith("_created"):
                    key = _key(sample)
                    since = sample.value - self._before.get(key, 0.0) if role is self._now else 0.0
                    value = former.get(key, 0.0) + since
                if "role" not in sample.labels:
                    value = sample.value if role is self._now else None
                if value is not None:
                    labels = sample.labels | (
                        {"role": role.value} if "role" in sample.labels else {}
                    )
                    yield sample._replace(labels=labels, value=value)


def _key(sample: Sample) -> _Key:
    return sample.name, tuple(sample.labels.items())
