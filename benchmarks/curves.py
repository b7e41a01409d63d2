"""Draws curves of several sides over one axis as an SVG that fits light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 190, 44, 40
_COLORS = ("#0b6fb8", "#c2571a", "#2e8b57", "#8a4fb0", "#b8962e", "#c03a5b", "#4f7f8f", "#777777")
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#222}.grid{stroke:#8886}polyline{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def draw(title: str, curves: Sequence[Curve], ticks: Mapping[float, str], *, is_log: bool = False) -> str:
    """Return an SVG. ``ticks`` are the labels of the x axis; ``is_log``: the y axis is logarithmic, and all y are above 0."""
    xs = [x for curve in curves for x, _ in curve.points]
    scale = _Scale.of([y for curve in curves for _, y in curve.points], is_log)
    left_x, span_x = min(xs), (max(xs) - min(xs)) or 1.0

    def at(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (x - left_x) / span_x

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{_STYLE}']
    parts.append(f"<title>{escape(title)}</title>" + _text(_LEFT, 20, title))
    for y in scale.grid:
        height = scale.height(y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(_text(_LEFT - 8, height + 4, f"{y:,.0f}", "end"))
    parts += [_text(at(x), _HEIGHT - _BOTTOM + 20, label, "middle") for x, label in ticks.items()]
    for number, curve in enumerate(curves):
        color, top = _COLORS[number % len(_COLORS)], _TOP + 8 + 22 * number
        points = " ".join(f"{at(x):.1f},{scale.height(y):.1f}" for x, y in curve.points)
        parts.append(f'<polyline stroke="{color}" points="{points}"/>')
        parts.append(f'<rect fill="{color}" x="{_WIDTH - _RIGHT + 12}" y="{top - 4}" width="14" height="4"/>')
        parts.append(_text(_WIDTH - _RIGHT + 32, top + 2, curve.name))
    return "".join([*parts, "</svg>\n"])


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


@dataclass(frozen=True, slots=True)
class _Scale:
    """The y axis, from its first to its last line."""

    grid: Sequence[float]
    is_log: bool

    @classmethod
    def of(cls, ys: Sequence[float], is_log: bool) -> _Scale:
        if is_log:
            first, last = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
            return cls([float(10**power) for power in range(first, max(last, first + 1) + 1)], is_log)
        step = 10 ** math.ceil(math.log10(max(*ys, 1.0))) / 5
        return cls([number * step for number in range(math.ceil(max(ys) / step) + 1)] if max(ys) else [0.0, 1.0], is_log)

    def height(self, y: float) -> float:
        """Return the coordinate of a value."""
        bottom, top, value = (math.log10(one) if self.is_log else one for one in (self.grid[0], self.grid[-1], y))
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - bottom) / (top - bottom)
