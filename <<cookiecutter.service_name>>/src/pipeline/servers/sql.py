"""The text of SQL without comments and quoted parts, as the guard of a connection looks at it."""

import re

# Neither backtracks, which takes exponential time in a long text.
_EDGE = re.compile(r"/\*|\*/")
_QUOTED = re.compile(
    # Each begins with a literal, which is found fast. A constant is continued in the next line, and
    # `a$b$` is a name.
    r"'(?<=E')(?<![\w$]E')(?:\\.|[^'\\]|'(?:\s|--[^\n\r]*+)*+')*+(?:'|\Z)|'[^']*+(?:'|\Z)"
    r"|\"[^\"]*+(?:\"|\Z)|\$(?<![\w$]\$)(?:[^\W\d]\w*+)?\$|--[^\n\r]*+|/\*",
    re.IGNORECASE | re.DOTALL,
)


def code_of(text: str) -> str:
    """Return statements with a space for each comment and quoted part."""
    parts, place = [], 0
    while found := _QUOTED.search(text, place):
        parts.append(text[place : found.start()])
        place = found.end()
        if (quote := found[0]) == "/*":
            place = _end_of_comment(text, place)
        elif quote[0] == "$":
            end = text.find(quote, place)
            place = len(text) if end < 0 else end + len(quote)
    return " ".join((*parts, text[place:]))


def _end_of_comment(text: str, place: int) -> int:
    """Return where the comment ends that begins before a place: in PostgreSQL they nest."""
    depth = 1
    for edge in _EDGE.finditer(text, place):
        depth += 1 if edge[0] == "/*" else -1
        if not depth:
            return edge.end()
    return len(text)
