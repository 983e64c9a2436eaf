"""What comes from outside, as text that does nothing: bounded, and with what is invisible named.

Escaping it for HTML is the templates' business.
"""

import contextlib
import json
import re
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby

from operate.output import Content, format_time
from pipeline.redaction import HIDDEN

LONGEST = 20_000
"""Characters of a payload that are shown; the rest is counted."""
_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
_DEEPEST = 100
"""Levels of JSON that are laid out: below that there is more indentation than text."""
_TOKENS = re.compile(r"""[\[{]\s*[\]}]|"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\[\]{}:,"\s]+""")
"""Those of JSON, which a parser has seen; an empty array or object is one."""


def visible(text: object, limit: int = 500) -> str:
    """Return a text in which controls, such as turn the direction of writing, are seen."""
    whole = "" if text is None else str(text)
    told = "".join(_seen(letter) for letter in whole[:limit])
    left = len(whole) - limit
    return told if left <= 0 else f"{told}… and {left:,} more characters"


def _seen(letter: str) -> str:
    if letter in "\n\t" or unicodedata.category(letter) not in _INVISIBLE:
        return letter
    return f"⟨U+{ord(letter):04X}⟩"


def content(data: Content, limit: int = LONGEST) -> str:
    """Return bytes as text: JSON with its lines, what is no text in hexadecimal digits."""
    if data is not None and "text" in data and len(data["text"]) <= limit:
        # Only what is shown whole is worth it, and parsing something huge takes long.
        with contextlib.suppress(ValueError, RecursionError):
            laid_out = _laid_out(data["text"])
            return plain(data if len(laid_out) > limit else {"text": laid_out}, limit)
    return plain(data, limit)


def editable(data: Content) -> str | None:
    """Return JSON to be changed in a form; None for what is no JSON, too long, or has secrets.

    Secrets are left out here, so that the form would store it without them. What is invisible is
    written as JSON's escapes, which mean the same.
    """
    if data is None or len(data.get("text", "")) > LONGEST or HIDDEN in data.get("text", ""):
        return None
    with contextlib.suppress(KeyError, ValueError, RecursionError):
        laid_out = _laid_out(data["text"])
        if len(laid_out) <= LONGEST:
            return "".join(_escaped(letter) for letter in laid_out)
    return None


def _escaped(letter: str) -> str:
    return letter if _seen(letter) == letter else json.dumps(letter)[1:-1]


def plain(data: Content, limit: int = LONGEST) -> str:
    """Return bytes as text in one piece, as one has to write it to search for it."""
    if data is None:
        return "(nothing)"
    if "hex" in data:
        return f"{len(data['hex']) // 2:,} bytes that are no UTF-8:\n{visible(data['hex'], limit)}"
    return visible(data["text"], limit)


def _laid_out(text: str) -> str:
    """Return JSON with its lines, and every token as it came. Raises `ValueError`.

    Written from what a parser returns it would be another: of a number it keeps the value and not
    the digits, and of a name that comes twice the last.
    """
    # Whether it is JSON: a number stays text, for it may have thousands of digits.
    json.loads(text, parse_int=str, parse_float=str)
    lines, depth = [""], 0
    for token in _TOKENS.findall(text):
        if token in ("{", "["):
            depth += 1
            if depth > _DEEPEST:
                raise ValueError("too deep")
            lines[-1] += token
            lines.append("  " * depth)
        elif token in ("}", "]"):
            depth -= 1
            lines.append("  " * depth + token)
        elif token == ",":
            lines[-1] += token
            lines.append("  " * depth)
        elif token == ":":
            lines[-1] += ": "
        else:
            lines[-1] += token if token[0] == '"' else "".join(token.split())
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> list[str]:
    """Return numbers in order as few words: `0-3`, `7`."""
    # What is as far from its place in the list follows what stands before it.
    runs = groupby(enumerate(numbers), lambda one: one[1] - one[0])
    found = [[number for _, number in run] for _, run in runs]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found]


def moment(time: datetime | None) -> str:
    """Return a time in UTC, to the second."""
    return "" if time is None else format_time(time)
