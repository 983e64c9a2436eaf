"""What comes from outside, as text that does nothing: bounded, and with what is invisible named.

Escaping it for HTML is the templates' business.
"""

import contextlib
import json
import unicodedata
from datetime import UTC, datetime

from pipeline.dead import Shown

LONGEST = 20_000
"""Characters of a payload that are shown; the rest is counted."""
_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}


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


def content(data: Shown, limit: int = LONGEST) -> str:
    """Return bytes as text: JSON with its lines, what is no text in hexadecimal digits."""
    if data is None:
        return "(nothing)"
    if "hex" in data:
        return f"{len(data['hex']) // 2:,} bytes that are no UTF-8:\n{visible(data['hex'], limit)}"
    text = data["text"]
    # Only what is shown whole is worth it, and parsing something huge takes long.
    if len(text) <= limit:
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return visible(text, limit)


def moment(time: datetime | None) -> str:
    """Return a time in UTC, to the second."""
    return "" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def ago(seconds: float | None) -> str:
    """Return how long, in the two largest units."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    for size, unit, smaller, below in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {below}"
    return f"{whole} s"
