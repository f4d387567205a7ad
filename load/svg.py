"""Plots as inline SVG: lines and dots on two axes. Pure; the page's style gives the colours."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COLOURS", "Line", "Mark", "chart", "drawing"]

COLOURS = 8
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 330, 62, 22, 14, 46
_TICKS = 6

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of x; `told` has the words that are shown over a point, if it is not the
    numbers.
    """

    name: str
    points: Sequence[Point]
    line: bool = True
    dots: bool = False
    faint: bool = False
    dashed: bool = False
    colour: int = 0
    told: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the plot at a value of x or of y, with a word on it."""

    name: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = (
            (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        )
        value = math.log10(max(value, self.low)) if self.log else value
        share = (value - low) / (high - low)
        return self.begin + min(1.02, max(-0.02, share)) * (self.end - self.begin)

    @property
    def ticks(self) -> list[float]:
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(powers) <= 4 else (1,)
            every = [step * 10.0**power for power in powers for step in steps]
            return [each for each in every if self.low * 0.999 <= each <= self.high * 1.001]
        rough = (self.high - self.low) / _TICKS
        power = 10 ** math.floor(math.log10(rough))
        step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * at for at in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    log_x: bool = False,
    y_most: float | None = None,
    percent: bool = False,
) -> str:
    """A figure with its caption and, for several names, a legend. Without any point it says so."""
    if not any(line.points for line in lines):
        return (
            f"<figure><figcaption>{html.escape(title)}</figcaption><p class=soft>nothing to "
            f"show</p></figure>"
        )
    named = [line for line in lines if line.name]
    keys = "".join(
        f'<span class="key k{line.colour % COLOURS}">{html.escape(line.name)}</span>'
        for line in named
    )
    legend = f'<p class="legend">{keys}</p>' if len(named) > 1 else ""
    drawn = drawing(
        title, x_label, y_label, lines, marks, log_x=log_x, y_most=y_most, percent=percent
    )
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{legend}{drawn}</figure>"


def drawing(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    marks: Sequence[Mark] = (),
    *,
    log_x: bool = False,
    y_most: float | None = None,
    percent: bool = False,
) -> str:
    """The plot alone, as an svg element; there is a point at least.

    `log_x` is for values over more than one power of ten; others stay as they are."""
    points = [point for line in lines for point in line.points]
    x = _x_axis(
        [at for at, _ in points] + [mark.x for mark in marks if mark.x is not None], log=log_x
    )
    highest = max([value for _, value in points] + [mark.y for mark in marks if mark.y is not None])
    y = _Axis(0.0, y_most or highest * 1.08 or 1.0, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(x, y, percent=percent), *(_mark(mark, x, y) for mark in marks)]
    for line in lines:
        parts += _drawn(line, x, y)
    parts.append(_label(x_label, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "middle"))
    parts.append(
        f'<text class="soft" transform="translate(14 {(_HEIGHT - _BOTTOM + _TOP) / 2:.0f}) '
        f'rotate(-90)" '
        f'text-anchor="middle">{html.escape(y_label)}</text>'
    )
    drawn = "".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{html.escape(title)}">{drawn}</svg>'
    )


def _x_axis(values: Sequence[float], *, log: bool) -> _Axis:
    low, high = max(min(values), 1e-3), max(max(values), 1e-3)
    if log and high / low > 10:
        return _Axis(low / 1.15, high * 1.15, _LEFT, _WIDTH - _RIGHT, log=True)
    return _Axis(0.0, max(values) * 1.04 or 1.0, _LEFT, _WIDTH - _RIGHT)


def _grid(x: _Axis, y: _Axis, *, percent: bool) -> list[str]:
    parts = []
    for tick in y.ticks:
        at = y.at(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_label(f"{tick:.0%}" if percent else _number(tick), _LEFT - 7, at + 4, "end"))
    for tick in x.ticks:
        at = x.at(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {_HEIGHT - _BOTTOM}v5"/>')
        parts.append(_label(_number(tick), at, _HEIGHT - _BOTTOM + 18, "middle"))
    return parts


def _label(text: str, x: float, y: float, anchor: str) -> str:
    return (
        f'<text class="soft" x="{x:.1f}" y="{y:.1f}" '
        f'text-anchor="{anchor}">{html.escape(text)}</text>'
    )


def _mark(mark: Mark, x: _Axis, y: _Axis) -> str:
    if mark.y is not None:
        at = y.at(mark.y)
        name = _label(mark.name, _WIDTH - _RIGHT - 4, at - 5, "end")
        return f'<path class="mark" d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}"/>{name}'
    at = x.at(mark.x or 0.0)
    return (
        f'<path class="mark" d="M{at:.1f} '
        f'{_TOP}V{_HEIGHT - _BOTTOM}"/>{_label(mark.name, at - 5, _TOP + 12, "end")}'
    )


def _drawn(line: Line, x: _Axis, y: _Axis) -> list[str]:
    colour, parts = f"s{line.colour % COLOURS}", []
    at = [(x.at(left), y.at(up)) for left, up in line.points]
    if line.line:
        path = "M" + "L".join(f"{left:.1f} {up:.1f}" for left, up in at)
        parts.append(f'<path class="line {colour}{" dashed" if line.dashed else ""}" d="{path}"/>')
    if line.dots:
        kind, size = ("dot faint", 1.8) if line.faint else ("dot", 3.6)
        for number, (left, up) in enumerate(at):
            value = line.points[number]
            words = (
                line.told[number]
                if line.told
                else f"{line.name} {_number(value[0])}: {_number(value[1])}"
            )
            parts.append(
                f'<circle class="{kind} {colour}" cx="{left:.1f}" cy="{up:.1f}" r="{size}">'
                f"<title>{html.escape(words)}</title></circle>"
            )
    return parts


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
