"""Untrusted data as text: shortened, with invisible characters written as their code points.

Templates escape it for HTML.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby

from onceward.cli.output import Content, format_time
from onceward.redaction import HIDDEN, harmless, is_visible

LONGEST = 20_000
"""Longest payload, in characters, that is shown whole; only the number of the rest is shown."""
_MAX_DEPTH = 100
"""Levels of JSON that are indented: deeper ones are more indentation than text."""
_TOKENS = re.compile(r"""[\[{]\s*[\]}]|"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\[\]{}:,"\s]+""")
"""Tokens of valid JSON; an empty array or object is one token."""


def visible(text: object, limit: int = 500) -> str:
    """Return a text with control characters, such as those for the writing direction, visible."""
    whole = "" if text is None else str(text)
    start = "".join(_visible_letter(letter) for letter in whole[:limit])
    left = len(whole) - limit
    return start if left <= 0 else f"{start}… and {left:,} more characters"


def _visible_letter(letter: str) -> str:
    return letter if is_visible(letter) else f"⟨U+{ord(letter):04X}⟩"


def content(data: Content, limit: int = LONGEST) -> str:
    """Return bytes as text: JSON is indented, bytes that are not UTF-8 are hexadecimal digits."""
    if data is not None and "text" in data and len(data["text"]) <= limit:
        # Only text that is shown whole is indented: parsing large text takes long.
        with contextlib.suppress(ValueError, RecursionError):
            indented = _indented(data["text"])
            return plain(data if len(indented) > limit else {"text": indented}, limit)
    return plain(data, limit)


def editable(data: Content) -> str | None:
    """Return JSON for editing in a form; None if it is not JSON, too long, or has secrets.

    Secrets are hidden in `data`, and the form would store the payload without them. Invisible
    characters are written as JSON escapes, which have the same meaning.
    """
    if data is None or len(data.get("text", "")) > LONGEST or HIDDEN in data.get("text", ""):
        return None
    with contextlib.suppress(KeyError, ValueError, RecursionError):
        indented = _indented(data["text"])
        if len(indented) <= LONGEST:
            return harmless(indented)
    return None


def plain(data: Content, limit: int = LONGEST) -> str:
    """Return bytes as text without indentation, as a search for it is written."""
    if data is None:
        return "(nothing)"
    if "hex" in data:
        return f"{len(data['hex']) // 2:,} bytes, not UTF-8:\n{visible(data['hex'], limit)}"
    return visible(data["text"], limit)


def _indented(text: str) -> str:
    """Return JSON with indented lines and unchanged tokens. Raises `ValueError` for other text.

    The result of a parser is not used: it has a number's value without its digits, and only the
    last of two equal names.
    """
    # Validation only; numbers stay text because they may have thousands of digits.
    json.loads(text, parse_int=str, parse_float=str)
    lines, depth = [""], 0
    for token in _TOKENS.findall(text):
        if token in ("{", "["):
            depth += 1
            if depth > _MAX_DEPTH:
                raise ValueError("nested too deeply")
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
    """Return ascending numbers as ranges: `0-3`, `7`."""
    # In a run of consecutive numbers, the difference between number and index is constant.
    runs = groupby(enumerate(numbers), lambda one: one[1] - one[0])
    found = [[number for _, number in run] for _, run in runs]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found]


def moment(time: datetime | None) -> str:
    """Return a time in UTC, to the second; empty for None."""
    return "" if time is None else format_time(time)


def trace_url(pattern: str | None, id: str | None) -> str | None:
    """Return the URL of a trace, with its id in the pattern; None if one of both is missing."""
    return pattern.replace("{trace_id}", id) if pattern and id else None
