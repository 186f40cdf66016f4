"""Charts in notebooks, as SVG that needs no library: bars, and curves over a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

# Eight colours that remain distinct for colour-blind readers and in grey (Okabe and Ito's order, black first for
# `none`).
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A")
_WIDTH, _ROW = 640, 20
_HEIGHT = 260  # of the area of curves
_MOST_POINTS = 800  # of a curve: more do not show
_BACKGROUND = "#FFFFFF"  # a notebook may be dark, and the first colour is black


def bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return horizontal bars as an SVG element: for each row its label, its length, and a text after the bar.

    Nothing is drawn (an empty text) if no length is above 0.
    """
    longest = max((length for _, length, _ in rows), default=0.0)
    if longest <= 0:
        return ""
    lines = []
    for number, (label, length, text) in enumerate(rows):
        y, size = number * _ROW, 260 * max(length, 0) / longest
        lines.append(
            f'<text x="195" y="{y + 14}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="200" y="{y + 3}" width="{size:.1f}" height="14" fill="{COLOURS[2]}"/>'
            f'<text x="{205 + size:.1f}" y="{y + 14}">{escape(text)}</text>'
        )
    return _svg(_ROW * len(rows), lines)


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], ends: Sequence[float], names: Sequence[str]) -> str:
    """Return step curves over sections of a time as an SVG element, with a legend of their labels.

    ``lines``: for each label its points, ordered in x. ``ends``: where in x each section ends, named by ``names``.
    Nothing is drawn (an empty text) without a point above 0.
    """
    top = max((y for points in lines.values() for _, y in points), default=0.0)
    if top <= 0:
        return ""
    drawn = []
    for number, (label, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        way, before = [], 0.0
        for x, y in _thinned(points):
            left, high = _WIDTH * x / ends[-1], _HEIGHT * (1 - max(y, 0) / top)
            way += [f"{left:.1f},{_HEIGHT * (1 - max(before, 0) / top):.1f}", f"{left:.1f},{high:.1f}"]
            before = y
        at = _HEIGHT + _ROW * (number + 2)
        drawn.append(
            f'<polyline points="{" ".join(way)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<rect x="0" y="{at - 9}" width="14" height="8" fill="{colour}"/>'
            f'<text x="20" y="{at}">{escape(label)}</text>'
        )
    start = 0.0
    for end, name in zip(ends, names, strict=True):
        left, middle = _WIDTH * end / ends[-1], _WIDTH * (start + end) / 2 / ends[-1]
        drawn.append(
            f'<line x1="{left:.1f}" y1="0" x2="{left:.1f}" y2="{_HEIGHT}" stroke="#BBBBBB"/>'
            f'<text x="{middle:.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{escape(name)}</text>'
        )
        start = end
    return _svg(_HEIGHT + _ROW * (len(lines) + 2), drawn)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return the points, or of many the highest of each run of neighbours, so that no peak is lost."""
    run = -(-len(points) // _MOST_POINTS)
    if run <= 1:
        return points
    return [max(points[first : first + run], key=lambda point: point[1]) for first in range(0, len(points), run)]


def _svg(height: int, lines: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="{_BACKGROUND}"/>'
        f"{''.join(lines)}</svg>"
    )
