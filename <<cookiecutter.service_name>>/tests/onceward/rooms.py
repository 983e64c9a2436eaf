"""The engine's own modules, without the optional packages and the command line."""

import re
from pathlib import Path

import onceward

ENGINE = Path(onceward.__file__).parent
ROOMS = frozenset(re.findall(r"`(\w+)/`", (ENGINE / "README.md").read_text("utf-8")))
"""Folders of the engine, which its page lists."""


def files() -> list[Path]:
    """Return the engine's modules."""
    return [
        *ENGINE.glob("*.py"),
        *(path for room in ROOMS for path in (ENGINE / room).rglob("*.py")),
    ]


def have(module: str) -> bool:
    """Return whether a module is one of the engine."""
    top, *rest = module.split(".")
    return (
        top == "onceward"
        and rest != []
        and (rest[0] in ROOMS or (ENGINE / f"{rest[0]}.py").exists())
    )
