"""Where the personal values of a payload are, as positions in its text.

Values are cut out of the text and put back into it, so that the payload is the same to the last
byte: its hash and its numbers do not change.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onceward.errors import OncewardError

from .marks import Personal, Shape, Subject

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_UNKNOWN = Subject("")
"""Subject of what the model does not declare, until the first one is found."""


class Unfit(OncewardError, ValueError):
    """The payload is no JSON, or does not name the subject of a personal value."""


class Span(NamedTuple):
    """A personal value: `text[start:end]`."""

    start: int
    end: int
    subject: Subject
    allows_null: bool


def spans(text: str, shape: Shape) -> list[Span]:
    """Return the personal values in a payload, in their order.

    What the model does not declare counts as personal, of the first subject. Raises `Unfit`.
    """
    finder = _Finder(text)
    try:
        start = _SPACE.match(text).end()  # type: ignore[union-attr]  # it always matches
        value, end = _DECODER.raw_decode(text, start)
        if _SPACE.fullmatch(text, end) is None:
            raise Unfit("text goes on behind the JSON")
        finder.look(start, value, [shape], ())
    except (ValueError, RecursionError, IndexError) as error:
        raise Unfit(str(error)) from None
    subjects = [one.subject for one in finder.found if one.subject is not _UNKNOWN]
    if finder.found and not subjects:
        raise Unfit("no subject is named")
    return sorted(
        one._replace(subject=subjects[0]) if one.subject is _UNKNOWN else one
        for one in finder.found
    )


class _Finder:
    def __init__(self, text: str) -> None:
        self._text = text
        self.found: list[Span] = []

    def look(
        self, start: int, value: Any, shapes: Sequence[Shape], around: tuple[Mapping[str, Any], ...]
    ) -> None:
        """Search a value, which begins at `start`; `around` are the objects that it is in."""
        faces = [face for shape in shapes for face in shape.faces]
        items = [face.items for face in faces if face.items]
        objects = [face for face in faces if face.members is not None]
        others = [face.others for face in faces if face.others]
        if isinstance(value, list) and items:
            for begin, end, part in _elements(self._text, start):
                self._take(begin, end, part, items, around)
        elif isinstance(value, dict) and (objects or others):
            for name, begin, end, one in _members(self._text, start):
                known = [part for face in objects if (part := (face.members or {}).get(name))]
                if objects and not known and not others:
                    self.found.append(Span(begin, end, _UNKNOWN, allows_null=True))
                    continue
                self._take(begin, end, one, known or others, (*around, value))

    def _take(
        self,
        start: int,
        end: int,
        value: Any,
        shapes: Sequence[Shape],
        around: tuple[Mapping[str, Any], ...],
    ) -> None:
        mark = next((one.marked for one in shapes if one.marked), None)
        if mark is None:
            if isinstance(value, dict | list):
                self.look(start, value, shapes, around)
        elif value is not None:
            allows_null = all(one.allows_null for one in shapes)
            self.found.append(Span(start, end, _subject(mark, around), allows_null))


def _subject(mark: Personal, around: Sequence[Mapping[str, Any]]) -> Subject:
    for one in reversed(around):
        if mark.of in one:
            if subject := mark.subject(one[mark.of]):
                return subject
            break
    raise Unfit(f"{mark.of} names no subject")


def _members(text: str, start: int) -> Iterator[tuple[str, int, int, Any]]:
    """Yield name, start, end and value of each member of the object at `start`."""
    at = _after_space(text, start + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        begin = _after_space(text, _after_space(text, at) + 1)
        value, end = _DECODER.raw_decode(text, begin)
        yield name, begin, end, value
        at = _next(text, end)


def _elements(text: str, start: int) -> Iterator[tuple[int, int, Any]]:
    """Yield start, end and value of each element of the array at `start`."""
    at = _after_space(text, start + 1)
    while text[at] != "]":
        value, end = _DECODER.raw_decode(text, at)
        yield at, end, value
        at = _next(text, end)


def _next(text: str, end: int) -> int:
    at = _after_space(text, end)
    return _after_space(text, at + 1) if text[at] == "," else at


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it matches nothing, too
    return match.end()
