"""A trace as SVG: a bar for each span, below each other as they begin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from website import pictures

WIDTH, LEFT, RIGHT, TOP, ROW = 960.0, 330.0, 90.0, 64.0, 34.0
COLOURS = ("#6b6b6b", "#2563a8", "#d9722e", "#3c8d5a")
_INK, _FAINT, _RED = "#222222", "#d8d8d8", "#a83244"
_LEAST = 4.0
"""Width of a bar at least: most spans are short beside the time between them."""


@dataclass(frozen=True)
class Span:
    """A span as it was received."""

    service: str
    name: str
    consumer: str
    """The handler's; empty where there is none."""
    trace_id: str
    id: str
    parent: str
    """Empty for the first of a trace."""
    links: tuple[str, ...]
    """Ids of the spans that it links to."""
    begin: int
    end: int
    """In nanoseconds."""
    is_error: bool
    attributes: Mapping[str, str]
    """By their names; empty where the value is no text."""


def draw(title: str, spans: Sequence[Span]) -> str:
    """Draw spans, the earliest first. A line leads to a child, a dashed one to what links."""
    services = list(dict.fromkeys(one.service for one in spans))
    colours = dict(zip(services, COLOURS, strict=False))
    begin, end = spans[0].begin, max(one.end for one in spans)
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    height = TOP + ROW * len(spans) + 50
    root = Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {WIDTH:g} {height:g}",
            "width": f"{WIDTH:g}",
            "role": "img",
            "font-family": "system-ui, sans-serif",
            "font-size": "12",
        },
    )
    SubElement(root, "title").text = title
    SubElement(root, "style").text = pictures.style()
    _add(root, "rect", x=0, y=0, width=WIDTH, height=height, fill="#ffffff")
    _text(root, title, 12, 22, size=15)
    x = 12.0
    for service, colour in colours.items():
        _add(root, "rect", x=x, y=36, width=10, height=10, fill=colour)
        _text(root, service, x + 15, 45)
        x += 35 + 7 * len(service)
    rows = {one.id: place for place, one in enumerate(spans)}
    for place, one in enumerate(spans):
        x, y = LEFT + (one.begin - begin) * scale, TOP + ROW * place
        for other in dict.fromkeys((one.parent, *one.links)):
            if other in rows:
                above = spans[rows[other]]
                from_x = LEFT + (above.begin - begin) * scale
                from_y = TOP + ROW * rows[other] + ROW / 2
                is_child = other == one.parent
                to_y = y + ROW / 2 + (0 if is_child else 5)
                path = f"M{from_x:.1f},{from_y:.1f} V{to_y:.1f} H{x:.1f}"
                style = {} if is_child else {"stroke-dasharray": "4 3"}
                _add(root, "path", d=path, fill="none", stroke="#999999", **style)
    for place, one in enumerate(spans):
        x, y = LEFT + (one.begin - begin) * scale, TOP + ROW * place
        milliseconds = (one.end - one.begin) / 1e6
        width = max(_LEAST, (one.end - one.begin) * scale)
        _add(root, "line", x1=12, y1=y + ROW, x2=WIDTH - 12, y2=y + ROW, stroke=_FAINT)
        edge = {"stroke": _RED, "stroke-width": "2"} if one.is_error else {}
        fill = colours[one.service]
        _add(root, "rect", x=x, y=y + 9, width=width, height=ROW - 18, fill=fill, **edge)
        name = f"{one.name}: {one.consumer}" if one.consumer else one.name
        _text(root, name, 12, y + ROW / 2 + 4)
        told = f"{milliseconds:.1f} ms" + (", failed" if one.is_error else "")
        _text(root, told, x + width + 6, y + ROW / 2 + 4)
    bottom = TOP + ROW * len(spans) + 18
    _text(root, "0 s", LEFT, bottom)
    _text(root, f"{(end - begin) / 1e9:.1f} s", WIDTH - RIGHT, bottom, anchor="end")
    _text(
        root,
        "a line leads from a span to its children, a dashed one to what links to it",
        12,
        bottom + 20,
    )
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _add(root: Element, tag: str, **attributes: float | str) -> Element:
    return SubElement(
        root,
        tag,
        {
            name.replace("_", "-"): one if isinstance(one, str) else f"{one:.1f}"
            for name, one in attributes.items()
        },
    )


def _text(
    root: Element, text: str, x: float, y: float, *, anchor: str = "start", size: float = 12
) -> None:
    one = _add(root, "text", x=x, y=y, fill=_INK, text_anchor=anchor, font_size=size)
    one.text = text
