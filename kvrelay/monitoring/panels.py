"""What a dashboard is made of, as values. Knows PromQL as text and nothing of Grafana's JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Dashboard", "Panel", "Query", "Row", "by", "mean", "quantiles", "rate", "ratio", "share_within"]

_SPAN = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` names a series, by its labels: {{role}}."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `unit` is Grafana's; `limit` a line across it, for a target, on whose side `good` it is met."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    about: str = ""
    limit: float | None = None
    stacked: bool = False
    good: Literal["above", "below"] = "below"


@dataclass(frozen=True, slots=True)
class Row:
    """Panels that belong together."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name` is its file's, and its address in Grafana."""

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]


def rate(metric: str, *labels: str) -> str:
    """How fast a counter grows per second, by these labels."""
    return f"{by('sum', *labels)} (rate({metric}[{_SPAN}]))"


def by(how: str, *labels: str) -> str:
    """An aggregation and what it keeps."""
    return f"{how} by ({', '.join(labels)})" if labels else how


def ratio(above: str, below: str, *labels: str) -> str:
    """How fast one counter grows for each unit of another."""
    return f"{rate(above, *labels)} / {rate(below, *labels)}"


def mean(metric: str, *labels: str) -> str:
    """Mean of what a histogram has seen lately."""
    return ratio(f"{metric}_sum", f"{metric}_count", *labels)


def quantiles(
    metric: str, *labels: str, of: tuple[float, ...] = (0.5, 0.9, 0.99), where: str = ""
) -> tuple[Query, ...]:
    """Quantiles of a histogram, for each value of these labels; of those series alone that match `where`."""
    named = "".join(f" {{{{{label}}}}}" for label in labels)
    buckets = rate(f"{metric}_bucket" + (f"{{{where}}}" if where else ""), "le", *labels)
    return tuple(Query(f"histogram_quantile({each}, {buckets})", f"p{each * 100:g}{named}") for each in of)


def share_within(metric: str, bound: float, *labels: str, span: str = _SPAN) -> str:
    """Share of what a histogram has seen, by these labels, that was at most `bound`, which is one of its bounds."""
    total = by("sum", *labels)
    within = f'{total} (rate({metric}_bucket{{le="{float(bound)}"}}[{span}]))'
    return f"{within} / {total} (rate({metric}_count[{span}]))"
