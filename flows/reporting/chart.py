"""A line chart as SVG, small enough to go into the text of an artifact.

Drawn by hand: matplotlib's import alone takes longer than an iteration of a small run.
"""

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 44, 44
MOST_POINTS = 300
"""Points of a line; of more, neighbours are averaged."""
COLORS = ("#1f6feb", "#2da44e", "#bf5700", "#8250df", "#cf222e", "#57606a")


@dataclass(frozen=True)
class Series:
    """One line of a chart, or its marks alone."""

    name: str
    points: Sequence[Point]
    marks: bool = False


def line_chart(title: str, series: Sequence[Series], x: str, y: str) -> str:
    """The SVG text of a chart on a white ground, which reads on a page of either theme.

    Args:
        title: above the chart.
        series: each in a colour of its own; values that are not finite are left out.
        x, y: names of the axes.
    """
    drawn = [(one, thinned([p for p in one.points if math.isfinite(p[1])])) for one in series]
    every = [point for _, points in drawn for point in points]
    x_ticks = ticks(*_ends([p[0] for p in every]), whole=True)
    y_ticks = ticks(*_ends([p[1] for p in every]))

    def at(point: Point) -> tuple[float, float]:
        across = (point[0] - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (point[1] - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#fff"/>',
        _text(LEFT, 20, title, size=14),
    ]
    for tick in y_ticks:
        _, height = at((x_ticks[0], tick))
        parts.append(f'<path d="M{LEFT} {height}H{WIDTH - RIGHT}" stroke="#d8dee4"/>')
        parts.append(_text(LEFT - 6, height + 4, f"{tick:g}", anchor="end"))
    for tick in x_ticks:
        across, _ = at((tick, y_ticks[0]))
        parts.append(_text(across, HEIGHT - BOTTOM + 18, f"{tick:g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x, anchor="middle"))
    parts.append(f'<g transform="translate(14 {HEIGHT / 2}) rotate(-90)">')
    parts.append(_text(0, 0, y, anchor="middle") + "</g>")
    for number, (one, points) in enumerate(drawn):
        color = COLORS[number % len(COLORS)]
        parts += _drawn([at(point) for point in points], color, marks=one.marks)
    return "".join(parts) + "".join(_legend([one.name for one, _ in drawn])) + "</svg>"


def data_uri(svg: str) -> str:
    """An SVG as an address that holds the picture itself."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS` points: of more, the means of neighbours; the last stays as it is."""
    size = -(-len(points) // MOST_POINTS) if points else 1
    if size == 1:
        return list(points)
    groups = [points[n : n + size] for n in range(0, len(points) - 1, size)]
    means = [(sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups]
    return [*means[: MOST_POINTS - 1], points[-1]]


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers that enclose `low` to `high`, about five of them, two at least."""
    if low == high:
        low, high = (low, low + 1) if whole else (low - 0.5, high + 0.5)
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 5, 10) if unit * k >= rough)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def _ends(values: Sequence[float]) -> Point:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _drawn(points: Sequence[Point], color: str, *, marks: bool) -> Iterator[str]:
    if marks or len(points) == 1:
        yield from (f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>' for x, y in points)
    elif points:
        path = " ".join(f"{x},{y}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    across = float(LEFT)
    for number, name in enumerate(names):
        color = COLORS[number % len(COLORS)]
        yield f'<rect x="{across:g}" y="29" width="10" height="10" rx="2" fill="{color}"/>'
        yield _text(across + 14, 38, name)
        across += 34 + 6.5 * len(name)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    bold = ' font-weight="600"' if size > 12 else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{bold}>'
        f"{escape(text)}</text>"
    )
