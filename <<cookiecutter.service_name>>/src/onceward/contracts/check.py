"""Compatibility of two exports: which events would be rejected, and by which side."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from onceward.cli.errors import Refused

from .compare import compare
from .export import FORMAT, STEP, UPCAST
from .findings import Finding


class Mode(StrEnum):
    """The directions to compare, named as in schema registries."""

    BACKWARD = "BACKWARD"
    """Readers with the new schemas accept events written with the old ones."""
    FORWARD = "FORWARD"
    """Readers with the old schemas accept events written with the new ones."""
    FULL = "FULL"
    """Both."""
    BACKWARD_TRANSITIVE = "BACKWARD_TRANSITIVE"
    """As BACKWARD, for all given exports instead of the latest one."""
    FORWARD_TRANSITIVE = "FORWARD_TRANSITIVE"
    FULL_TRANSITIVE = "FULL_TRANSITIVE"

    @property
    def is_transitive(self) -> bool:
        """Whether all earlier exports are compared."""
        return self.endswith("_TRANSITIVE")

    @property
    def directions(self) -> Sequence["Mode"]:
        """BACKWARD, FORWARD or both."""
        name = self.removesuffix("_TRANSITIVE")
        return (Mode.BACKWARD, Mode.FORWARD) if name == "FULL" else (Mode(name),)


@dataclass(frozen=True)
class Verdict:
    """A change of an event's schema that breaks compatibility, or may break it."""

    topic: str
    type: str
    is_break: bool
    """False if the comparison cannot decide."""
    text: str


_TRY = "; test the upcaster with an event of the old schema"
"""What to do about an upcaster, whose code the comparison does not run."""

_REJECTIONS = {
    ("taken", Mode.BACKWARD): "the service rejects events {what}, which it accepted before",
    ("taken", Mode.FORWARD): (
        "an instance of the service that has not been updated rejects events {what}"
    ),
    ("published", Mode.BACKWARD): (
        "a consumer that has been updated rejects events {what}, as were published before"
    ),
    ("calls", Mode.BACKWARD): "the service rejects stored calls {what}",
    ("calls", Mode.FORWARD): (
        "an instance of the service that has not been updated rejects calls {what}"
    ),
    ("published", Mode.FORWARD): "a consumer that has not been updated rejects events {what}",
}
_OF_RECORDS = {
    "identity": "an event is identified by {now}, and was by {before}: it gets another id",
    "type": (
        "a type is named by {now}, and was by {before}: an event gets another hash, and another id"
        " unless that is its position"
    ),
    "data": "the data of an event is {now}, and was {before}: it gets another hash",
}
"""What ids and hashes depend on, by the field of an exported codec."""
_OF_ONE_SIDE = {"structured": "taken", "framing": "published", "strategy": "published"}
"""Arguments of codecs that affect only events that are consumed, or published."""
_STRUCTURED = "in structured mode without their content type"
_REJECTED: Sequence[tuple[tuple[str, object, object], Mode, str]] = [
    (("structured", True, False), Mode.BACKWARD, _STRUCTURED),
    (("structured", False, True), Mode.FORWARD, _STRUCTURED),
    (
        ("framing", "prefix", "header"),
        Mode.FORWARD,
        "whose schema a header names, unless its deserializer reads that header",
    ),
]
"""Arguments that were and are now of these values: the direction that breaks, and which events."""
_LACKED = "events that were published before lack `{path}`, which is now required"


def read(paths: Sequence[Path], mode: Mode) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the exports to compare with; in a folder, its `*.json` files in order of names.

    Numbers in names are ordered by value. Raises `Refused` for a file that is not an export; in a
    folder, such a file is skipped. Raises it for an export of a later format, too.
    """
    found = []
    for path in paths:
        if not path.is_dir():
            found.append((path, _read(path)))
            continue
        for file in sorted(path.glob("*.json"), key=_order):
            with suppress(Refused):
                found.append((file, _read(file)))
    if not found:
        raise Refused(f"no *.json file with an export is in {', '.join(map(str, paths))}")
    found = found if mode.is_transitive else found[-1:]
    for file, export in found:
        if export["format"] > FORMAT:
            raise Refused(
                f"{file} has the format {export['format']} of exports, and this service reads"
                f" {FORMAT}: use the template's version that wrote it, or a later one"
            )
    return found


def _order(file: Path) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", file.name)
    return [(int(one), "") if place % 2 else (0, one) for place, one in enumerate(parts)]


def _read(file: Path) -> Mapping[str, Any]:
    try:
        export = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise Refused(f"{file} is not JSON: {error}") from None
    if (
        not isinstance(export, dict)
        or not {"taken", "published"} <= export.keys()
        or not isinstance(export.get("format"), int)
    ):
        raise Refused(
            f"{file} is not an export of schemas: create one with `service schema export --format"
            " json-schema`"
        )
    return export


def verdicts(old: Mapping[str, Any], new: Mapping[str, Any], mode: Mode) -> Iterator[Verdict]:
    """Yield the events that would be rejected, and those that cannot be decided."""
    codecs = new.get("codecs", {})
    for topic, codec in sorted(old.get("codecs", {}).items()):
        now = codecs.get(topic, codec)
        if now["codec"] != codec["codec"]:
            text = f"the codec is {now['codec']}, and was {codec['codec']}: use another topic"
            yield Verdict(topic, "all types", True, text)
            continue
        yield from _records(topic, codec, now)
        sides = {side for side in ("taken", "published") if topic in new.get(side, {})}
        for is_break, text in _arguments(codec, now, sides, mode):
            yield Verdict(topic, "all types", is_break, text)
    for side in ("taken", "published", "calls"):
        before = {
            (topic, type): schemas
            for topic, types in old.get(side, {}).items()
            for type, schemas in types.items()
        }
        for (topic, type), schemas in sorted(before.items()):
            now = new.get(side, {}).get(topic, {}).get(type)
            for direction in mode.directions:
                for is_break, text in _changes(side, direction, schemas, now):
                    yield Verdict(topic, type, is_break, text)


def _records(topic: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Verdict]:
    """Yield what gives the same record another id, hash or type."""
    both = old.keys() & new.keys()
    for field, sentence in _OF_RECORDS.items():
        now, before = new.get(field), old.get(field)
        if now != before and (field in both or field == "identity"):
            text = sentence.format(now=_place(field, now), before=_place(field, before))
            yield Verdict(topic, "all types", True, f"{text}: use another topic")
    if new.get("type") != old.get("type") or "types" not in both:
        return  # records have other names, or 1.0.0 did not export the types
    now, before = new["types"], old["types"]
    if not isinstance(now, Mapping) or not isinstance(before, Mapping):
        if now != before:
            text = "cannot be decided: a function gives records their types, or did so before"
            yield Verdict(topic, "all types", False, text)
        return
    for name in sorted(now.keys() | before.keys()):
        types = now.get(name, name), before.get(name, name)
        if types[0] != types[1]:
            text = "cannot be decided: such a record is now of the type {}, and was of {}"
            yield Verdict(topic, name, False, text.format(*types))


def _arguments(
    old: Mapping[str, Any], new: Mapping[str, Any], sides: Collection[str], mode: Mode
) -> Iterator[tuple[bool, str]]:
    """Yield what other arguments of a codec do; those that only one export has are skipped."""
    for name in sorted((old.keys() & new.keys()) - {"types", *_OF_RECORDS}):
        before, now, side = old[name], new[name], _OF_ONE_SIDE.get(name)
        if before == now or (side and side not in sides):
            continue
        change = name, before, now
        known = [(direction, what) for one, direction, what in _REJECTED if one == change]
        for direction, what in known:
            if side and direction in mode.directions:
                yield True, _REJECTIONS[side, direction].format(what=what)
        if not known:
            texts = (json.dumps(one, ensure_ascii=False) for one in (now, before))
            text = "cannot be decided: the codec's {} is {}, and was {}"
            yield False, text.format(name, *texts)


def _place(field: str, place: Any) -> str:
    if field == "data":
        return "the whole payload" if place is None else f"at {place}"
    if place is None:
        return "CloudEvents only"
    match place:
        case {"kind": str(kind), "names": [*names]}:
            return " ".join(["the", kind, ", ".join(map(str, names))]).strip()
        case _:  # a custom codec's
            return json.dumps(place, ensure_ascii=False)


def _changes(
    side: str, direction: Mode, old: Mapping[str, Any], new: Mapping[str, Any] | None
) -> Iterator[tuple[bool, str]]:
    if new is None:
        if (side, direction) == ("taken", Mode.BACKWARD):
            yield True, "the service no longer handles events of this type from this topic"
        elif (side, direction) == ("calls", Mode.BACKWARD):
            yield True, "no handler accepts stored calls of this type"
        elif (side, direction) == ("published", Mode.FORWARD):
            yield True, "the service no longer publishes events of this type to this topic"
        return
    if UPCAST in old or UPCAST in new:
        if direction is Mode.BACKWARD:
            yield from _upcasts(old, new)
        return
    writer, reader = (old, new) if direction is Mode.BACKWARD else (new, old)
    written = writer.get("serialization") or writer["validation"]
    read = reader.get("validation") or reader["serialization"]
    for one in compare(written, read, is_open=side == "taken"):
        yield one.kind != "undecided", _sentence(side, direction, one)


def _upcasts(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    if (UPCAST in old) != (UPCAST in new):
        yield False, f"cannot be decided: an upcaster converts the events, or did so before{_TRY}"
        return
    for member in (UPCAST, STEP):
        before, now = old.get(member), new.get(member)
        if before and now and before != now:
            text = "cannot be decided: an upcaster converts the events to {}, and did so to {}{}"
            yield False, text.format(now, before, _TRY)
            return


def _sentence(side: str, direction: Mode, finding: Finding) -> str:
    rejection = _REJECTIONS[side, direction]
    if finding.kind == "undecided":
        return f"cannot be decided: whether {rejection.format(what=f'by {finding.what}')}"
    if finding.kind == "lacks" and (side, direction) == ("published", Mode.BACKWARD):
        return _LACKED.format(path=finding.path)
    return rejection.format(what=finding.what)
