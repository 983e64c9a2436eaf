"""Pictures on light and on dark pages."""

from pathlib import Path

DARK = {
    "#ffffff": "#16181a",
    "#222222": "#e6e6e6",
    "#d8d8d8": "#3a3d40",
    "#999999": "#8a8f94",
    "#2563a8": "#6ea3dd",
    "#d9722e": "#e59560",
    "#3c8d5a": "#6dbb8a",
    "#8a4f9e": "#b98bcb",
    "#a83244": "#dd7484",
    "#6b6b6b": "#a3a3a3",
}
"""Colours of plots and traces, and what they are on a dark page."""


def style() -> str:
    """Return the style of an SVG that changes its colours on a dark page."""
    rules = [
        f'[{kind}="{light}"] {{ {kind}: {dark}; }}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    ]
    return "\n".join(("", "@media (prefers-color-scheme: dark) {", *rules, "}", ""))


def dark_twin(picture: Path) -> Path:
    """Return the path of the picture that replaces another one on dark pages."""
    return picture.with_stem(f"{picture.stem}-dark")
