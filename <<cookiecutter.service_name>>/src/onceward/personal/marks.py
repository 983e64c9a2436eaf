"""Which fields of an event are personal, found in the JSON Schema of its model.

The schema describes the JSON whatever the model is made of: nested models, data classes, lists,
unions. `Personal` leaves a mark in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from onceward.errors import UNSTORABLE
from onceward.events.event import Event

_MARK = "x-personal"
_LONGEST = 500
"""Characters of a subject, which is in an index."""


class Subject(NamedTuple):
    """A person; two of different kinds may have one name: `driver:17` may be an id, too."""

    name: str
    """The id; with a kind: `driver:17`."""
    kind: str | None = None
    """Of a name with a colon, which would be ambiguous otherwise; empty for an id without a kind.
    Keys of version 1.0.0 have none."""

    @classmethod
    def of(cls, id: str, kind: str = "") -> "Subject":
        """Return the subject with this id, of this kind."""
        name = f"{kind}:{id}" if kind else id
        return cls(name, kind if ":" in name else None)


@dataclass(frozen=True)
class Personal:
    """Marks a field as personal data of a subject.

    ```python
    class CustomerMoved(Event, type="customer.moved.v1", topic="customers"):
        customer_id: str
        address: Annotated[Address | None, Personal(of="customer_id")]
    ```

    `of` is the JSON name of the field with the subject's id: of the same model, or else of one that
    contains it. It must be required, a text or a whole number, and not personal itself: ids stay.
    `kind` separates ids that are not unique across subjects, such as those of customers and of
    drivers: the subject is then `driver:17`, and not that of the id `driver:17` without a kind.

    When the subject is forgotten, a value becomes null if the field's type allows it; else the
    event can't be read any more. The value is hidden in logs and wherever payloads are displayed,
    as a secret is.
    """

    of: str
    kind: str = ""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        mark = {"of": self.of} | ({"kind": self.kind} if self.kind else {})
        return {**handler(schema), "writeOnly": True, _MARK: mark}

    def subject(self, value: object) -> Subject | None:
        """Return the subject with this id; None if the value is no id that can be stored."""
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            return None
        one = Subject.of(str(value), self.kind)
        return None if len(one.name) > _LONGEST or UNSTORABLE.search(one.name) else one


@dataclass(eq=False)
class Shape:
    """What a value of JSON may be, as far as it matters here."""

    types: Sequence[str] = ()
    """JSON types; empty: any."""
    mark: Personal | None = None
    members: Mapping[str, "Shape"] | None = None
    """Of an object that is described member by member."""
    required: Sequence[str] = ()
    others: "Shape | None" = None
    """Values of an object without names of its own, such as a dict."""
    items: "Shape | None" = None
    alternatives: Sequence["Shape"] = field(default_factory=list)

    @cached_property
    def faces(self) -> Sequence["Shape"]:
        """This one and all of its alternatives."""
        found: dict[int, Shape] = {}
        left = [self]
        while left:
            one = left.pop()
            if id(one) not in found:
                found[id(one)] = one
                left += reversed(one.alternatives)
        return list(found.values())

    @property
    def marked(self) -> Personal | None:
        """The mark of one of its faces."""
        return next((one.mark for one in self.faces if one.mark), None)

    @property
    def allows_null(self) -> bool:
        """Whether null is a value of it."""
        kinds = [one for one in self.faces if not one.alternatives]
        return any(not one.types or "null" in one.types for one in kinds)

    @property
    def is_id(self) -> bool:
        """Whether it is always a text or a whole number."""
        kinds = [one for one in self.faces if not one.alternatives]
        return all(one.types and {"string", "integer"}.issuperset(one.types) for one in kinds)

    @cached_property
    def is_personal(self) -> bool:
        """Whether a mark is in it."""
        return any(one.mark for one in _reachable(self))


def shape_of(model: type[Event]) -> Shape:
    """Return the shape of a model's JSON, by names and by aliases."""
    schemas = [
        model.model_json_schema(by_alias, schema_generator=_Lenient) for by_alias in (True, False)
    ]
    return Shape(alternatives=[_of_schema(one) for one in schemas])


class _Lenient(GenerateJsonSchema):
    """Generates a schema that accepts anything where a type has none."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> JsonSchemaValue:
        """Return a schema that accepts anything."""
        return {}


def _of_schema(schema: Mapping[str, Any]) -> Shape:
    definitions = schema.get("$defs", {})
    known: dict[str, Shape] = {}

    def made(node: Any) -> Shape:
        node = node if isinstance(node, dict) else {}
        one = Shape()
        fill(one, node)
        return one

    def referred(reference: str) -> Shape:
        name = reference.removeprefix("#/$defs/")
        if name not in known:
            known[name] = Shape()  # before it is filled: it may refer to itself
            fill(known[name], definitions.get(name, {}))
        return known[name]

    def fill(one: Shape, node: Mapping[str, Any]) -> None:
        types = node.get("type", ())
        one.types = [types] if isinstance(types, str) else types
        one.mark = Personal(**node[_MARK]) if _MARK in node else None
        if "properties" in node:
            one.members = {name: made(part) for name, part in node["properties"].items()}
            one.required = node.get("required", ())
        elif isinstance(others := node.get("additionalProperties"), dict | bool):
            one.others = made(others)
        items = [*node.get("prefixItems", ()), *([node["items"]] if "items" in node else ())]
        if items:
            one.items = Shape(alternatives=[made(part) for part in items])
        one.alternatives = [
            *(made(part) for name in ("anyOf", "oneOf", "allOf") for part in node.get(name, ())),
            *([referred(node["$ref"])] if "$ref" in node else ()),
        ]

    return made(schema)


def _reachable(shape: Shape) -> Iterator[Shape]:
    seen: set[int] = set()
    left = [shape]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [*one.alternatives, *(one.members or {}).values()]
            left += [part for part in (one.others, one.items) if part]


def mistakes(model: type[Event]) -> Iterator[str]:
    """Yield what is wrong with the marks of a model, a sentence each."""
    # By its names in JSON: those of Python may be others.
    shape = _of_schema(model.model_json_schema(schema_generator=_Lenient))
    if not shape.is_personal:
        return
    yield from dict.fromkeys(_wrong(model.__name__, shape, (), ()))
    if any(_several_names(model.__pydantic_core_schema__)):
        yield (
            f"{model.__name__} has personal fields, and an AliasChoices or AliasPath: give each"
            " field one name, so that the personal ones are found in the JSON"
        )


def _wrong(
    path: str, shape: Shape, around: tuple[Shape, ...], inside: tuple[int, ...]
) -> Iterator[str]:
    if shape.marked:
        if why := _wrong_subject(shape.marked, around):
            yield f"{path} is personal data of {shape.marked.of!r}: {why}"
        return
    for one in shape.faces:
        if id(one) in inside:
            continue
        within = (*inside, id(one))
        for name, part in (one.members or {}).items():
            yield from _wrong(f"{path}.{name}", part, (*around, one), within)
        for part in filter(None, (one.others, one.items)):
            yield from _wrong(path, part, around, within)


def _wrong_subject(mark: Personal, around: Sequence[Shape]) -> str | None:
    for one in reversed(around):
        subject = (one.members or {}).get(mark.of)
        if subject is None:
            continue
        if mark.of not in one.required or not subject.is_id or subject.marked:
            return "that field must be required, a text or a whole number, and not personal itself"
        return None
    return (
        "there is no field of this name in its model, nor in those that contain it. Name the field"
        " with the subject's id as JSON has it"
    )


def _several_names(schema: object) -> Iterator[bool]:
    """Yield True for each field of a schema of Pydantic that has more than one name in JSON."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield isinstance(one.get("validation_alias"), list)
            left += [part for name, part in one.items() if name != "metadata"]
        elif isinstance(one, list | tuple):
            left += one
