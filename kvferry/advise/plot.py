"""Draws the share of good requests over the rate, for both sides, as one SVG that fits light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT = 640, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 48
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#222}.grid{stroke:#8886}"
    ".a{stroke:#0b6fb8;fill:#0b6fb8}.b{stroke:#c2571a;fill:#c2571a}"
    "polyline{fill:none!important;stroke-width:2}.goal{stroke:#8889;stroke-dasharray:5 4}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.a{stroke:#6db8f2;fill:#6db8f2}.b{stroke:#f2a36d;fill:#f2a36d}}</style>"
)


def draw(rates: Sequence[float], curves: Sequence[tuple[str, Sequence[float]]], share: float) -> str:
    """Return an SVG. ``rates`` in requests/s rise; each of the two curves has a name and one share, 0 to 1, for each rate."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(rate: float) -> float:
        return _LEFT + width * rate / rates[-1]

    def y(good: float) -> float:
        return _TOP + height * (1 - good)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{_STYLE}']
    for tenth in range(0, 11, 2):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tenth / 10):.1f}" y2="{y(tenth / 10):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 8}" y="{y(tenth / 10) + 4:.1f}" text-anchor="end">{tenth * 10} %</text>')
    for rate in rates:
        parts.append(f'<text x="{x(rate):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{rate:.3g}</text>')
    parts.append(f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">requests per second</text>')
    parts.append(f'<line class="goal" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(share):.1f}" y2="{y(share):.1f}"/>')
    for index, ((name, shares), kind) in enumerate(zip(curves, "ab", strict=True)):
        points = " ".join(f"{x(rate):.1f},{y(good):.1f}" for rate, good in zip(rates, shares, strict=True))
        left = _LEFT + index * width / 2
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
        parts.append(f'<rect class="{kind}" x="{left}" y="14" width="14" height="4"/>')
        parts.append(f'<text x="{left + 20}" y="20">within the SLO, {name}</text>')
    return "".join([*parts, "</svg>\n"])
