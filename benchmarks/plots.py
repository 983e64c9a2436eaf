"""Plots as SVG: bars with whiskers, and lines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from website import pictures

WIDTH, HEIGHT = 720.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 24.0, 64.0, 48.0
COLOURS = ("#2563a8", "#d9722e", "#3c8d5a", "#8a4f9e", "#a83244", "#6b6b6b")
_INK, _FAINT = "#222222", "#d8d8d8"
_TICKS = 5
_LETTER = 7.0
"""Width of a letter, about."""
SATURATED = "No run counts: the machine was saturated."


@dataclass(frozen=True)
class Bar:
    """A figure with its spread."""

    label: str
    value: float
    least: float
    most: float


Points = Sequence[tuple[float, float]]


class _Canvas:
    def __init__(self, title: str, height: float = HEIGHT) -> None:
        self.height = height
        self.root = Element(
            "svg",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH:g} {height:g}",
            width=f"{WIDTH:g}",
            role="img",
        )
        self.root.set("font-family", "system-ui, sans-serif")
        self.root.set("font-size", "12")
        SubElement(self.root, "title").text = title
        SubElement(self.root, "style").text = pictures.style()
        self.add("rect", x=0, y=0, width=WIDTH, height=height, fill="#ffffff")
        self.text(title, 12, 22, size=15)

    def add(self, tag: str, **attributes: float | str) -> Element:
        return SubElement(
            self.root,
            tag,
            {
                name.replace("_", "-"): one if isinstance(one, str) else f"{one:.1f}"
                for name, one in attributes.items()
            },
        )

    def text(
        self, text: str, x: float, y: float, *, anchor: str = "start", size: float = 12
    ) -> None:
        one = self.add("text", x=x, y=y, fill=_INK, text_anchor=anchor, font_size=size)
        one.text = text

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1
    ) -> None:
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width)

    def curve(
        self, places: Points, colour: str, dashes: str = "", *, has_dots: bool = False
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        one = self.add("polyline", points=path, fill="none", stroke=colour, stroke_width=2)
        if dashes:
            one.set("stroke-dasharray", dashes)
        for x, y in places if has_dots else ():
            self.add("circle", cx=x, cy=y, r=3.5, fill=colour)

    def legend(self, names: Sequence[str]) -> None:
        x = LEFT
        for name, colour in zip(names, COLOURS, strict=False):
            self.add("rect", x=x, y=36, width=10, height=10, fill=colour)
            self.text(name, x + 15, 45)
            x += 35 + _LETTER * len(name)

    def drawn(self) -> str:
        indent(self.root)
        return tostring(self.root, encoding="unicode") + "\n"


def note(title: str, text: str) -> str:
    """Draw a text in place of a figure."""
    canvas = _Canvas(title, TOP + BOTTOM)
    canvas.text(text, 12, TOP)
    return canvas.drawn()


def bars(title: str, unit: str, series: Mapping[str, Sequence[Bar]]) -> str:
    """Draw lying bars, each series in its colour; whiskers show the spread."""
    every = [bar for one in series.values() for bar in one]
    if not every:
        return note(title, SATURATED)
    step = 24.0
    canvas = _Canvas(title, TOP + BOTTOM + step * len(every))
    left = 16 + _LETTER * max(len(bar.label) for bar in every)
    bottom = canvas.height - BOTTOM
    ticks = steps(max(bar.most for bar in every))
    scale = (WIDTH - RIGHT - 60 - left) / ticks[-1]
    for tick in ticks:
        canvas.line(left + tick * scale, TOP, left + tick * scale, bottom, _FAINT)
        canvas.text(figure(tick), left + tick * scale, bottom + 16, anchor="middle")
    canvas.text(unit, left, bottom + 36)
    if len(series) > 1:
        canvas.legend(list(series))
    y = TOP + 4
    for place, one in enumerate(series.values()):
        for bar in one:
            colour = COLOURS[place % len(COLOURS)]
            width = bar.value * scale
            canvas.add("rect", x=left, y=y, width=width, height=step - 8, fill=colour)
            middle = y + (step - 8) / 2
            canvas.line(left + bar.least * scale, middle, left + bar.most * scale, middle, _INK, 2)
            canvas.text(bar.label, left - 8, middle + 4, anchor="end")
            canvas.text(figure(bar.value), left + bar.most * scale + 8, middle + 4)
            y += step
    return canvas.drawn()


def lines(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Points],
    *,
    dashed: Mapping[str, Points] = MappingProxyType({}),
    logarithmic: bool = False,
) -> str:
    """Draw a line for each series, from zero upwards. `logarithmic` says it of what goes across.

    Those that are `dashed` have the colours of the series with their names.
    """
    canvas = _Canvas(title)
    every = [point for drawn in (series, dashed) for one in drawn.values() for point in one]
    if not every:
        return note(title, SATURATED)
    xs = sorted({x for x, _ in every})
    ticks = steps(max((y for _, y in every), default=0))
    right, bottom = WIDTH - RIGHT, canvas.height - BOTTOM

    def measured(x: float) -> float:
        return math.log(x) if logarithmic else x

    begin, end = measured(xs[0]), measured(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        share = (measured(x) - begin) / (end - begin) if end > begin else 0.5
        return LEFT + share * (right - LEFT), bottom - y / ticks[-1] * (bottom - TOP)

    for tick in ticks:
        _, y = at(xs[0], tick)
        canvas.line(LEFT, y, right, y, _FAINT)
        canvas.text(figure(tick), LEFT - 6, y + 4, anchor="end")
    for x in xs if logarithmic else [tick for tick in steps(xs[-1]) if xs[0] <= tick <= xs[-1]]:
        canvas.text(figure(x), at(x, 0)[0], bottom + 16, anchor="middle")
    canvas.text(across, right, bottom + 36, anchor="end")
    canvas.text(up, 12, TOP - 6 if len(series) == 1 else bottom + 36)
    if len(series) > 1:
        canvas.legend(list(series))
    colours = dict(zip(series, cycle(COLOURS), strict=False))
    for drawn, dashes in ((series, ""), (dashed, "6 4")):
        for name, points in drawn.items():
            places = [at(*point) for point in points]
            canvas.curve(places, colours[name], dashes, has_dots=logarithmic)
    return canvas.drawn()


def steps(most: float) -> list[float]:
    """Return round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    size: float = 10 ** math.floor(math.log10(most / _TICKS))
    step = next(size * times for times in (1, 2, 5, 10) if size * times * _TICKS >= most)
    return [number * step for number in range(math.ceil(round(most / step, 6)) + 1)]


def figure(value: float) -> str:
    """Return a number as it is written beside an axis."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
