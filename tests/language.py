"""`python -m tests.language PATH...`: report phrases that plain technical English does not have.

Each is printed with its file and line, and with words to replace it. A phrase is also found in a
name, and where it is wrapped; not in code between backticks.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = {
    "(?:is|are|was|were) no": "is not, has no, without",
    "th(?:at|ose) of": "the noun again",
    r"of (?:its|their|his|my|our|your|one'?s) own(?![\s_]\w)": "its own …, a separate …",
    "(?:go|goes|going|went|gone) on": "continue, resume",
    "(?:die|dies|died|deaths?) over": "crashed while it handled …",
    "anew": "again, re-created",
    "beside": "next to, with, in addition to, compared with",
    "too(?=[.,;:)])": "also",
    "one of both": "one of the two",
    "so many": "the number, at most …",
    "again and again": "repeatedly, until …",
    "nobody|somebody|whoever": "the part or the role that does it",
    "the outside": "other services",
    "characters that can be seen": "printable characters",
    "a moment without": "what it waits for",
    "ledger rig": "chaos test",
}
"""Each phrase, as a regular expression, with what to write instead."""

ALLOWED = (
    "there (?:is|are|was|were) no",
    "(?:is|are|was|were) no (?:longer|more than|less than)",
    '"go on"',  # a value of `after_death`
)
"""Phrases that PostgreSQL's documentation has, or that are values, and contain a forbidden one."""

_SPACE = r"""(?:[\s_#*"]|f(?="))+"""
"""Between two words: of a text, a name, a comment or a string of several lines."""

_CODE = re.compile(r"^ *(```+).*?^ *\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)
"""Code in a page."""


def _phrase(pattern: str) -> str:
    return rf"(?<![^\W_])(?:{pattern})(?![^\W_])".replace(" ", _SPACE)


_PHRASES = re.compile(
    "|".join(
        (
            *(f"(?:{_phrase(one)})" for one in ALLOWED),
            *(f"({_phrase(one)})" for one in FORBIDDEN),
        )
    ),
    re.IGNORECASE,
)


def faults(text: str, *, is_page: bool) -> Iterator[tuple[int, str]]:
    """Yield the line of each forbidden phrase, and what is wrong with it."""
    if is_page:
        text = _CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), text)
    for found in _PHRASES.finditer(text):
        if found.lastindex is not None:
            phrase = " ".join(re.split(_SPACE, found[0]))
            better = list(FORBIDDEN.values())[found.lastindex - 1]
            line = text.count("\n", 0, found.start()) + 1
            yield line, f"{phrase!r}: write {better}"


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for suffix in ("md", "py", "html"):
        yield from sorted(path.rglob(f"*.{suffix}"))


if __name__ == "__main__":
    found = [
        f"{file}:{line}: {fault}"
        for path in sys.argv[1:]
        for file in _files(Path(path))
        if file.name != "language.py"
        for line, fault in faults(file.read_text("utf-8"), is_page=file.suffix == ".md")
    ]
    sys.exit("\n".join(found) or None)
