"""The commands `service schema …` on a service that takes and publishes events."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from sqlalchemy import MetaData
from typer.testing import CliRunner

from onceward import (
    CloudEvents,
    Codec,
    Event,
    Handlers,
    Policy,
    Service,
    Tombstone,
    Transaction,
)
from onceward.contracts import asyncapi, export
from onceward.contracts.commands import group
from onceward.contracts.examples import example_of
from onceward.contracts.schemas import schema_of
from onceward.events.event import reader
from onceward.handlers.staging import CALLS
from onceward.plain import Header, PayloadFields, Plain, Position

Given = Mapping[str, Any]


class Line(BaseModel):
    """A part of an order."""

    sku: str
    count: int = Field(ge=1)


class Ordered(Event, type="ordered.v2"):
    """Somebody has ordered.

    The rest of the docstring is no summary.
    """

    lines: list[Line] = Field(min_length=1)
    total: Decimal
    way: tuple[str, int] | None = None


@Ordered.upcast("ordered.v1")
def _(data: dict[str, Any]) -> dict[str, Any]:
    return data


class Paid(Event, type="paid/v1", topic="test-contracts-payments"):
    """An order was paid."""

    order: str
    way: Literal["card", "cash"]
    token: SecretStr = SecretStr("")
    checked: int = Field(0, serialization_alias="isChecked")


class Checked(Event, type="paid_v1", topic="test-contracts-payments"):
    """Its validator accepts no example that is made from the schema."""

    name: str

    @field_validator("name")
    @classmethod
    def is_ada(cls, value: str) -> str:
        assert value == "ada"
        return value


class Shown(Event, type="shown", topic="test-contracts-shown"):
    """Has an example of its own."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "ada"}]})

    name: str


class Counted(Event, type="line"):
    """A line by itself."""

    sku: str


async def note(event: Event, tx: Transaction) -> None:
    """Take an event."""


EVENTS: list[type[Event]] = [Paid, Checked, Shown, Ordered]


def shop() -> Service:
    """Return a service."""
    handlers = Handlers()
    patient = Policy(attempts=3, schedule=(60, 5_400), max_age=7_200, after_death="hold")
    handlers.on(Ordered, topic="orders", consumer="note", policy=patient, mode="deferred")(note)
    handlers.on(Ordered, topic="orders", consumer="note-too", takes_old=True)(note)
    handlers.on(Tombstone, topic="orders", consumer="note")(note)
    handlers.on(Counted, topic="lines", consumer="note")(note)
    plain = Plain(type="line", identity=Position())
    handlers.topic("lines", codec=plain, demands_types=True)
    return Service("shop", handlers, MetaData(), package=__package__)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """Return the service; of all events of the process it declares those above."""
    monkeypatch.setattr(export, "declared_events", lambda: EVENTS)
    return shop()


def run(service: Service, *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error."""
    done = CliRunner().invoke(group(service), [str(one) for one in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_the_export_has_every_event_by_topic_and_type(service: Service) -> None:
    code, out, _ = run(service, "export")
    found = json.loads(out)
    assert code == 0
    assert {topic: {*types} for topic, types in found["taken"].items()} == {
        "lines": {"line"},
        "orders": {"ordered.v1", "ordered.v2", "tombstone"},
    }
    assert {topic: {*types} for topic, types in found["published"].items()} == {
        "test-contracts-payments": {"paid/v1", "paid_v1"},
        "test-contracts-shown": {"shown"},
    }
    assert found["taken"]["orders"]["ordered.v1"] == {"upcast": "ordered.v2", "to": "ordered.v2"}
    assert found["taken"]["orders"]["ordered.v2"]["validation"]["required"] == ["lines", "total"]
    paid = found["published"]["test-contracts-payments"]["paid/v1"]
    assert paid["serialization"]["required"] == ["order", "way", "token", "checked"]
    assert paid["validation"]["required"] == ["order", "way"]


@pytest.mark.parametrize("format", ["json-schema", "asyncapi"])
def test_an_export_is_the_same_text_each_time(
    service: Service, format: str, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "export.json"
    assert run(service, "export", "--format", format, "--output", file) == (0, "", "")
    assert run(service, "export", "--format", format) == (0, file.read_text("utf-8"), "")
    text = file.read_text("utf-8")
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def test_an_event_without_a_schema_is_refused_with_advice(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(Event, type="odd", topic="test-contracts-odd"):
        """Has a field of a type without a JSON Schema."""

        model_config = ConfigDict(arbitrary_types_allowed=True)

        one: ModuleType

    monkeypatch.setattr(export, "declared_events", lambda: [Odd])
    code, out, err = run(service, "export")
    assert (code, out) == (1, "")
    assert "Odd has no JSON Schema" in err
    assert "WithJsonSchema" in err


def references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [one for each in node for one in references(each)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
    return own + [one for each in node.values() for one in references(each)]


def test_the_asyncapi_document_describes_topics_events_and_consumers(service: Service) -> None:
    made = asyncapi.described(service)
    assert {*made["channels"]} == {
        *("lines", "orders", "test-contracts-payments", "test-contracts-shown")
    }
    assert made["channels"]["lines"]["x-unknown-types"] == "dead letter"
    actions = [one["action"] for one in made["operations"].values()]
    assert sorted(actions) == ["receive"] * 4 + ["send"] * 2
    (first,) = (
        one for name, one in made["operations"].items() if name == "receive.note.orders.ordered.v2"
    )
    assert first["x-consumer"]["policy"] == {
        "attempts": 3,
        "maxAge": 7_200,
        "schedule": [60, 5_400],
        "afterDeath": "hold",
    }
    for text in ("stored first", "after 1 min, 90 min, up to 3 attempts in 2 h", "redriven"):
        assert text in first["description"]
    messages = made["components"]["messages"]
    assert len(messages) == 6
    assert messages["orders.ordered.v2"]["x-older-types"] == ["ordered.v1"]
    assert messages["orders.ordered.v2"]["summary"] == "Somebody has ordered."
    assert "Position()" in messages["lines.line"]["description"]
    for reference in references(made):
        node = made
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def test_examples_are_the_models_own_or_made_and_always_valid(service: Service) -> None:
    messages = asyncapi.described(service)["components"]["messages"]
    payloads = {
        one["title"]: one["examples"][0]["payload"]
        for one in messages.values()
        if "examples" in one
    }
    assert payloads["Shown"] == {"name": "ada"}
    assert payloads["Ordered"] == {
        "lines": [{"sku": "text", "count": 1}],
        "total": 1,
        "way": ["text", 1],
    }
    assert payloads["Paid"]["token"] == "**********"
    assert "Checked" not in payloads
    for event in (Ordered, Paid, Shown):
        reader(event)(json.dumps(payloads[event.__name__]).encode())


def test_schemas_of_one_name_that_differ_are_kept_apart(service: Service) -> None:
    document = asyncapi._Document(service)
    first = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"type": "string"}}, "$ref": "#/$defs/A"}
    second = {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"type": "null"}}, "$ref": "#/$defs/A"}
    assert [document._schema(one, "A") for one in (first, second, first)] == ["A", "A-2", "A"]
    assert document.made["components"]["schemas"]["A-2"] == {"$ref": "#/components/schemas/B-2"}


Edit = Callable[[Any], object]


def without(*path: str) -> Edit:
    def edit(found: Any) -> None:
        for name in path[:-1]:
            found = found[name]
        if isinstance(found, list):
            found.remove(path[-1])
        else:
            del found[path[-1]]

    return edit


def to(value: Any, *path: str) -> Edit:
    def edit(found: Any) -> None:
        for name in path[:-1]:
            found = found[name]
        found[path[-1]] = value

    return edit


PAID = "published", "test-contracts-payments", "paid/v1"
ORDERED = "taken", "orders", "ordered.v2", "validation"
CHANGES: list[tuple[str, Edit, str]] = [
    (
        "FORWARD",
        to(["order", "way", "place"], *PAID, "validation", "required"),
        (
            "test-contracts-payments, paid/v1: a consumer that has not been updated rejects events"
            " without `place`"
        ),
    ),
    (
        "BACKWARD",
        without(*PAID, "serialization", "required", "order"),
        "events that were published before lack `order`, which is now required",
    ),
    (
        "FORWARD",
        to("integer", *PAID, "validation", "properties", "order", "type"),
        "a consumer that has not been updated rejects events whose `order` is a string",
    ),
    (
        "BACKWARD",
        to(["card", "coin"], *PAID, "serialization", "properties", "way", "enum"),
        (
            'a consumer that has been updated rejects events whose `way` is "coin", as were'
            " published before"
        ),
    ),
    (
        "BACKWARD",
        without(*ORDERED, "required", "total"),
        "orders, ordered.v2: the service rejects events without `total`, which it accepted before",
    ),
    (
        "FORWARD",
        to(9, *ORDERED, "$defs", "Line", "properties", "count", "minimum"),
        (
            "an instance of the service that has not been updated rejects events whose"
            " `lines[].count` is less than 9"
        ),
    ),
    (
        "BACKWARD",
        to({"validation": {}}, "taken", "orders", "ordered.v3"),
        "orders, ordered.v3: the service no longer handles events of this type from this topic",
    ),
    (
        "FORWARD",
        to({"x": {"serialization": {}}}, "published", "gone"),
        "gone, x: the service no longer publishes events of this type to this topic",
    ),
]


@pytest.fixture
def old(service: Service, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an edited export into a file, and returns its path."""

    def write(edit: Edit = dict, name: str = "old.json") -> Path:
        made = json.loads(json.dumps(export.exported(service)))
        edit(made)
        (tmp_path / name).write_text(json.dumps(made), "utf-8")
        return tmp_path / name

    return write


def test_an_equal_export_is_compatible(service: Service, old: Callable[..., Path]) -> None:
    assert run(service, "check", old()) == (0, "The events are compatible (FULL).\n", "")
    assert run(service, "check", old(), "--json") == (0, "", "")


@pytest.mark.parametrize(("mode", "edit", "sentence"), CHANGES)
def test_a_break_is_a_sentence_and_exit_code_1(
    service: Service, old: Callable[..., Path], mode: str, edit: Edit, sentence: str
) -> None:
    code, out, _ = run(service, "check", old(edit), "--mode", mode)
    assert code == 1
    assert sentence in out
    assert run(service, "check", old(edit))[0] == 1
    other = {"FORWARD": "BACKWARD", "BACKWARD": "FORWARD"}[mode]
    assert sentence not in run(service, "check", old(edit), "--mode", other)[1]
    lines = run(service, "check", old(edit), "--mode", mode.lower(), "--json")[1].splitlines()
    assert any(json.loads(one)["text"] in sentence for one in lines)


def test_what_cannot_be_decided_is_a_warning(service: Service, old: Callable[..., Path]) -> None:
    odd = to({"type": "string", "not": {}}, *PAID, "validation", "properties", "order")
    code, out, err = run(service, "check", old(odd), "--mode", "FORWARD")
    assert (code, out) == (0, "")
    assert "cannot be decided: whether a consumer that has not been updated" in err
    before = to({"validation": {"type": "object"}}, "taken", "orders", "ordered.v1")
    code, out, err = run(service, "check", old(before), "--mode", "BACKWARD")
    assert (code, out) == (0, "")
    assert "orders, ordered.v1: cannot be decided: an upcaster converts the events" in err
    assert "; test the upcaster with an event of the old schema" in err


@pytest.mark.parametrize("member", ["upcast", "to"])
def test_another_target_of_an_upcaster_is_a_warning(
    service: Service, old: Callable[..., Path], member: str
) -> None:
    file = old(to("ordered.v1a", "taken", "orders", "ordered.v1", member))
    code, out, err = run(service, "check", file)
    assert (code, out) == (0, "")
    text = (
        "an upcaster converts the events to ordered.v2, and did so to ordered.v1a; test the"
        " upcaster with an event of the old schema"
    )
    assert err.count(f"orders, ordered.v1: cannot be decided: {text}") == 1


def test_the_export_has_the_steps_of_upcasters(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stepped(Event, type="stepped.v3"):
        """Has two older types."""

    Stepped.upcast("stepped.v2")(lambda data: data)
    Stepped.upcast("stepped.v1", to="stepped.v2")(lambda data: data)
    Stepped.upcast("stepped.v0")(lambda data: data)
    handlers = Handlers()
    handlers.on(Stepped, topic="steps", consumer="note")(note)
    monkeypatch.setattr(export, "declared_events", list)
    taken = export.exported(Service("shop", handlers, MetaData()))["taken"]["steps"]
    targets = {name: one["to"] for name, one in taken.items() if "to" in one}
    assert targets == {
        "stepped.v2": "stepped.v3",
        "stepped.v1": "stepped.v2",
        "stepped.v0": "stepped.v3",
    }


def test_members_that_are_newly_forbidden_are_a_break(
    service: Service, old: Callable[..., Path]
) -> None:
    closed = to(False, *ORDERED, "additionalProperties")
    code, out, _ = run(service, "check", old(closed), "--mode", "FORWARD")
    assert code == 1
    assert "rejects events with members that its schema does not name" in out


PLAIN = Plain(type="line", identity=Header("id"))
NAMED = Plain(type=Header("T"), identity=PayloadFields("a", "b.c"), types={"N": "line"})
CODECS: list[tuple[Codec, Codec, Sequence[str]]] = [
    (CloudEvents(), PLAIN, ["the codec is Plain, and was CloudEvents: use another topic"]),
    (
        PLAIN,
        replace(PLAIN, identity=Position()),
        ["an event is identified by the position, and was by the header id: it gets another id"],
    ),
    (
        NAMED,
        replace(NAMED, identity=PayloadFields("a")),
        ["identified by the payload fields a, and was by the payload fields a, b.c"],
    ),
    (
        PLAIN,
        replace(PLAIN, type=Header("T"), types={"N": "line"}),
        ["is named by the header t, and was by the constant line: an event gets another hash"],
    ),
    (
        PLAIN,
        replace(PLAIN, data="inner"),
        ["the data of an event is at inner, and was the whole payload: it gets another hash"],
    ),
    (replace(PLAIN, data="inner"), PLAIN, ["is the whole payload, and was at inner"]),
    (PLAIN, replace(PLAIN, identity=Position(), data="inner"), ["the position", "at inner"]),
    (PLAIN, replace(PLAIN, identity=Header("ID"), content_type="application/x+json"), []),
    (NAMED, replace(NAMED, type=Header("t")), []),
]


@pytest.mark.parametrize(("before", "now", "sentences"), CODECS)
def test_another_id_or_hash_of_the_same_record_is_a_break(
    service: Service,
    old: Callable[..., Path],
    before: Codec,
    now: Codec,
    sentences: Sequence[str],
) -> None:
    service.handlers.codecs["lines"] = before
    file = old()
    service.handlers.codecs["lines"] = now
    code, out, err = run(service, "check", file)
    lines = out.splitlines() if sentences else []
    assert (code, len(lines), err) == (int(bool(sentences)), len(sentences), "")
    for line, sentence in zip(lines, sentences, strict=True):
        assert line.startswith("lines, all types: ")
        assert sentence in line
        assert line.endswith(": use another topic")


def test_another_type_for_a_name_is_a_warning(service: Service, old: Callable[..., Path]) -> None:
    service.handlers.codecs["lines"] = NAMED
    file = old()
    assert json.loads(file.read_text("utf-8"))["codecs"]["lines"] == {
        "codec": "Plain",
        "identity": {"kind": "payload fields", "names": ["a", "b.c"]},
        "type": {"kind": "header", "names": ["t"]},
        "types": {"N": "line"},
        "data": None,
    }
    service.handlers.codecs["lines"] = replace(NAMED, types={"M": "line"})
    code, _, err = run(service, "check", file)
    assert code == 0
    assert "lines, M: cannot be decided: such a record is now of the type line, and was of M" in err
    assert "lines, N: cannot be decided: such a record is now of the type N, and was of line" in err
    service.handlers.codecs["lines"] = replace(NAMED, types=str.lower)
    code, _, err = run(service, "check", file)
    assert code == 0
    assert "lines, all types: cannot be decided: a function" in err
    assert run(service, "check", old()) == (0, "The events are compatible (FULL).\n", "")


@pytest.mark.parametrize("codec", [CloudEvents(), CloudEvents(structured=True), NAMED])
def test_an_export_of_1_0_0_has_no_arguments_to_compare(
    service: Service, old: Callable[..., Path], codec: Codec
) -> None:
    """It has the codec's name, those arguments of `Plain`, and the last type of an upcaster."""

    def edit(found: Any) -> None:
        if isinstance(codec, CloudEvents):
            found["codecs"]["lines"] = {"codec": "CloudEvents"}
        del found["taken"]["orders"]["ordered.v1"]["to"]

    service.handlers.codecs["lines"] = codec
    assert run(service, "check", old(edit)) == (0, "The events are compatible (FULL).\n", "")


STRUCTURED = "events in structured mode without their content type"


@pytest.mark.parametrize(
    ("mode", "structured", "sentence"),
    [
        ("BACKWARD", False, f"the service rejects {STRUCTURED}, which it accepted before"),
        (
            "FORWARD",
            True,
            f"an instance of the service that has not been updated rejects {STRUCTURED}",
        ),
    ],
)
def test_another_reading_of_structured_events_is_a_break_of_one_side(
    service: Service, old: Callable[..., Path], mode: str, structured: bool, sentence: str
) -> None:
    codecs = service.handlers.codecs
    codecs["lines"] = codecs["test-contracts-shown"] = CloudEvents(structured=not structured)
    file = old()
    codecs["lines"] = codecs["test-contracts-shown"] = CloudEvents(structured=structured)
    for given in (mode, "FULL"):
        code, out, err = run(service, "check", file, "--mode", given)
        assert (code, out, err) == (1, f"lines, all types: {sentence}\n", "")
    other = {"FORWARD": "BACKWARD", "BACKWARD": "FORWARD"}[mode]
    assert run(service, "check", file, "--mode", other)[0] == 0


@dataclass(frozen=True, slots=True)
class Custom(CloudEvents):
    """Has arguments of its own."""

    arguments: Mapping[str, object] = field(default_factory=dict)

    def contract(self) -> Mapping[str, object]:
        return self.arguments


class Silent:
    """Reads and writes records, without being a subclass of `Codec`."""

    codec = CloudEvents()
    open, prepare, decode, encode = codec.open, codec.prepare, codec.decode, codec.encode


def test_another_argument_of_a_custom_codec_is_a_warning(
    service: Service, old: Callable[..., Path]
) -> None:
    service.handlers.codecs["lines"] = Custom(arguments={"parts": ("a", 1), "type": "a"})
    file = old()
    assert run(service, "check", file)[1:] == ("The events are compatible (FULL).\n", "")
    service.handlers.codecs["lines"] = Custom(arguments={"parts": ("a", 2), "later": True})
    code, out, err = run(service, "check", file)
    assert (code, out) == (0, "")
    text = """cannot be decided: the codec's parts is ["a", 2], and was ["a", 1]"""
    assert f"lines, all types: {text}" in err
    service.handlers.codecs["lines"] = Custom(arguments={"type": "b"})
    assert 'named by "b", and was by "a"' in run(service, "check", file)[1]
    service.handlers.codecs["lines"] = Custom(arguments={"type": {"b": 1}})
    assert 'named by {"b": 1}, and was by "a"' in run(service, "check", file)[1]


def test_a_codec_without_a_contract_is_exported_by_its_name(service: Service) -> None:
    service.handlers.codecs["lines"] = Silent()
    assert export.exported(service)["codecs"]["lines"] == {"codec": "Silent"}


def test_a_field_that_later_exports_add_is_not_compared(
    service: Service, old: Callable[..., Path]
) -> None:
    assert run(service, "check", old(to("new", "codecs", "lines", "later")))[0] == 0


def test_stored_calls_are_compared(service: Service, old: Callable[..., Path]) -> None:
    one = next(iter(service.handlers))
    service.handlers.add(replace(one, topic=CALLS, event=Paid, consumer="pay", mode="call"))
    paid = "calls", "(calls)", "paid/v1"
    assert run(service, "check", old(), "--mode", "FULL")[0] == 0
    fewer = old(without(*paid, "serialization", "required", "order"))
    code, out, _ = run(service, "check", fewer, "--mode", "BACKWARD")
    assert code == 1
    assert "(calls), paid/v1: the service rejects stored calls without `order`" in out
    gone = old(to({"validation": {}}, *paid[:2], "gone"))
    assert "no handler accepts stored calls of this type" in run(service, "check", gone)[1]


class Literal_(BaseModel):
    """Ends an expression."""

    value: int


class Sum(BaseModel):
    """Has two further expressions."""

    left: "Sum | Literal_"
    right: "Sum | Literal_"


def test_a_recursive_union_has_a_finite_example() -> None:
    class Calculated(Event, type="calculated"):
        """Has an expression."""

        sum: Sum

    made = example_of(Calculated, schema_of(Calculated, "validation"))
    assert made is not None
    Calculated.model_validate(made)


def test_a_folder_has_exports_in_natural_order(
    service: Service, old: Callable[..., Path], tmp_path: Path
) -> None:
    old(CHANGES[0][1], "v9.json")
    old(name="v10.json")
    (tmp_path / "w.json").write_text("{}", "utf-8")
    assert run(service, "check", tmp_path, "--mode", "FORWARD")[0] == 0
    assert run(service, "check", tmp_path, "--mode", "FORWARD_TRANSITIVE")[0] == 1


def test_the_transitive_kinds_compare_with_all_exports(
    service: Service, old: Callable[..., Path]
) -> None:
    broken = old(CHANGES[0][1], "1.json")
    latest = old(name="2.json")
    for paths in ([broken, latest], [broken.parent]):
        assert run(service, "check", *paths, "--mode", "FORWARD")[0] == 0
        code, out, _ = run(service, "check", *paths, "--mode", "FORWARD_TRANSITIVE")
        assert code == 1
        assert out.startswith(f"{broken}: ")
        assert run(service, "check", *paths, "--mode", "BACKWARD_TRANSITIVE")[0] == 0
    assert run(service, "check", latest, broken, "--mode", "FORWARD")[0] == 1


def test_a_file_that_is_no_export_is_refused(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "wrong.json"
    for text, said in (
        ("{", "is not JSON"),
        ("{}", "is not an export"),
        ('{"format": "1", "taken": {}, "published": {}}', "is not an export"),
        ("[]", "is not an export"),
    ):
        file.write_text(text, "utf-8")
        code, _, err = run(service, "check", file)
        assert code == 1
        assert said in err
    file.write_text('{"format": 2, "taken": {}, "published": {}}', "utf-8")
    for path in (file, tmp_path):
        code, _, err = run(service, "check", path)
        assert code == 1
        assert "wrong.json has the format 2 of exports, and this service reads 1" in err
    (tmp_path / "empty").mkdir()
    assert "no *.json file with an export" in run(service, "check", tmp_path / "empty")[2]
    assert run(service, "check", tmp_path / "missing")[0] == 2
