"""The registry of handlers: what it finds, and the mistakes it refuses at import."""

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Annotated, Any, Generic, NewType, TypeVar

import pytest
from pydantic import Field, create_model
from sqlalchemy import Text, join, outerjoin
from sqlalchemy.dialects.postgresql import TIME, TIMESTAMP
from sqlalchemy.ext.declarative import ConcreteBase
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    column_property,
    declared_attr,
    mapped_column,
)

from onceward import (
    Aggregate,
    Applied,
    CloudEvents,
    Codec,
    Event,
    EventBatch,
    Gaps,
    Handlers,
    Message,
    Policy,
    Record,
    Sequenced,
    Service,
    Tombstone,
    Transaction,
)
from onceward.handlers.aggregate import Loads, create, key_of
from onceward.handlers.columns import primary_key
from onceward.handlers.registry import Handler
from onceward.handlers.staging import CALLS
from onceward.plain import Plain, Position
from onceward.retry.workers import BacklogWorkers
from onceward.service import Misconfigured
from onceward.settings import Settings

Function = Callable[..., Awaitable[object]]
E = TypeVar("E", bound=Event)
T = TypeVar("T")


class Base(DeclarativeBase):
    """Tables of these tests, which no database has."""


class Seat(Aggregate, Base):
    """A row with a key of two columns, whose attributes are named otherwise."""

    __tablename__ = "seat"

    flight: Mapped[str] = mapped_column("flight_no", Text, primary_key=True)
    number: Mapped[int] = mapped_column("seat_no", primary_key=True, autoincrement=False)


class Row(Sequenced, Aggregate, Base):
    """A row that follows numbered events."""

    __tablename__ = "row"

    flight: Mapped[str] = mapped_column(Text, primary_key=True)


class Booked(Event, type="booked"):
    """A seat was booked."""

    flight: str
    seat: int


class BookedToo(Event, type="booked"):
    """Another model of the same type."""


class Freed(Event, type="freed"):
    """A seat was freed."""

    flight: str


async def note(event: Event, tx: Transaction) -> None:
    """Take an event."""


async def note_too(event: Event, tx: Transaction) -> None:
    """Take an event."""


def test_handlers_of_a_type_are_found_by_topic_in_registration_order() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="z")(note)
    handlers.on(Booked, topic="a", consumer="b")(note_too)
    handlers.on(Freed, topic="b", consumer="b")(note)
    assert [one.consumer for one in handlers.of("a", "booked")] == ["z", "b"]
    assert [one.function for one in handlers.of("a", "booked")] == [note, note_too]
    assert handlers.of("b", "booked") == handlers.of("c", "booked") == ()
    assert handlers.topics == {"a", "b"}


def test_the_decorated_function_stays_what_it_was() -> None:
    assert Handlers().on(Booked, topic="a", consumer="b")(note) is note


def test_a_consumer_can_not_take_the_same_events_twice() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="seats")(note)
    with pytest.raises(TypeError, match="consumer 'seats' already takes 'booked' of topic 'a'"):
        handlers.on(Booked, topic="a", consumer="seats")(note_too)
    assert [one.function for one in handlers.of("a", "booked")] == [note]


def test_a_consumer_may_take_other_types_and_other_topics() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="seats")(note)
    handlers.on(Freed, topic="a", consumer="seats")(note)
    handlers.on(Booked, topic="b", consumer="seats")(note)
    assert handlers.topics == {"a", "b"}


def test_two_models_of_one_type_are_refused_on_one_topic() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="seats")(note)
    with pytest.raises(TypeError, match="Booked and BookedToo both have the type 'booked'"):
        handlers.on(BookedToo, topic="a", consumer="others")(note)
    handlers.on(BookedToo, topic="b", consumer="others")(note)


@pytest.mark.parametrize("fields", [(), ("flight",), ("flight", "row"), ("flight", "seat", "seat")])
def test_fields_that_do_not_hold_the_primary_key_are_refused(fields: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match=r"primary key \(flight, number\)"):
        Handlers().on(Booked, topic="a", consumer="b", loads=Seat.by(*fields))


@pytest.mark.parametrize("loads", [Seat, [Seat], "Seat"])
def test_what_declares_no_row_is_refused(loads: Any) -> None:
    with pytest.raises(TypeError, match=r"loads= takes what Class\.by"):
        Handlers().on(Booked, topic="a", consumer="b", loads=loads)


def test_the_declared_key_is_read_from_the_event_in_column_order() -> None:
    loads = Seat.by("flight", "seat")
    loads.check(Booked)
    assert loads.key_of(Booked(flight="LH1", seat=7)) == ("LH1", 7)
    assert primary_key(Seat) == ("flight", "number")


def test_a_new_row_has_its_key_and_version_0() -> None:
    seat = create(Seat, ("LH1", 7))
    assert (seat.flight, seat.number, seat.version) == ("LH1", 7, 0)
    assert key_of(seat) == ("LH1", 7)


def test_a_plain_topic_is_described_once() -> None:
    handlers = Handlers()
    assert handlers.codec("a") == CloudEvents()
    how = Plain("booked", Position())
    handlers.topic("a", codec=how)
    assert handlers.codec("a") is how
    with pytest.raises(TypeError, match="topic 'a' is declared twice"):
        handlers.topic("a", codec=Plain("freed", Position()))


class Waiting(CloudEvents):
    """Its `decode` is a coroutine function."""

    async def decode(self, record: Record, *, hash: bytes | None = None) -> Message:  # type: ignore[override]
        return super().decode(record, hash=hash)


class Partial:
    """Is no subclass of `Codec`."""

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        return CloudEvents().decode(record, hash=hash)


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (CloudEvents, r"^codec= takes an object: write codec=CloudEvents\(…\)$"),
        (
            Partial(),
            r"^Partial has no method prepare: write `class Partial\(Codec\)`",
        ),
        (
            Waiting(),
            "^Waiting.decode is called in the event loop and waits for nothing: write `def`",
        ),
    ],
)
def test_what_is_no_codec_is_refused(codec: Codec, text: str) -> None:
    handlers = Handlers()
    with pytest.raises(TypeError, match=text):
        handlers.topic("a", codec=codec)
    handlers.topic("a", codec=CloudEvents())


def test_only_the_topics_that_a_handler_asks_for_have_tombstones() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="b")(note)
    handlers.on(Tombstone, topic="b", consumer="b")(note)
    assert [handlers.takes_tombstones(topic) for topic in ("a", "b", "c")] == [False, True, False]


def test_types_are_demanded_topic_by_topic() -> None:
    handlers = Handlers()
    handlers.topic("a", demands_types=True)
    assert handlers.demanding == {"a"}


def test_renaming_topics_keeps_their_options_and_never_merges_two() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="bookings", consumer="note")(note)
    handlers.on(Freed, topic="seats", consumer="note")(note)
    handlers.topic("bookings", codec=Plain(type="booked", identity=Position()))
    handlers.topic("seats", demands_types=True)

    renamed = handlers.with_topics("{}-7".format)

    assert renamed.topics == {"bookings-7", "seats-7"}
    assert renamed.demanding == {"seats-7"}
    assert renamed.codecs.keys() == renamed.closed.keys(), "a codec that is never opened"
    assert handlers.topics == {"bookings", "seats"}
    with pytest.raises(ValueError, match="two topics would have the same name"):
        handlers.with_topics(lambda topic: "one")


async def correcting(event: Booked, tx: Transaction) -> None:
    pass


async def recalling(was: Applied, tx: Transaction) -> None:
    pass


def test_a_correction_is_apart_from_the_handlers_of_its_topic() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="book", mode="deferred", own_transaction=True)(note)
    handlers.correct(Booked, topic="a", of="book", consumer="rebook")(correcting)
    handlers.correct(Applied, topic="a", of="book", consumer="recall")(recalling)
    assert [one.consumer for one in handlers] == ["book", "rebook", "recall"]
    assert handlers.consumers == {"book", "rebook", "recall"}
    assert [one.consumer for one in handlers.of("a", "booked")] == ["book"]
    assert handlers.of("a", "(applied)") == ()
    (correction,) = handlers.of("a", "booked", "rebook")
    assert (correction.corrects, correction.order, correction.mode) == ("book", "book", "deferred")
    assert (correction.policy, correction.own_transaction) == (Policy(attempts=1), True)
    assert handlers.corrections == {"rebook": "book", "recall": "book"}
    assert handlers.recalling == {"recall"}
    assert [one.consumer for one in handlers.holders("a")] == ["book"]
    renamed = handlers.with_topics("{}-7".format)
    assert renamed.topics == {"a-7"}
    assert renamed.corrections == handlers.corrections
    assert [one.consumer for one in renamed.of("a-7", "booked", "rebook")] == ["rebook"]


def test_a_correction_that_could_never_be_made_is_refused() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="book")(note)
    handlers.on(Booked, topic=None, consumer="ask")(note)
    with pytest.raises(TypeError, match="'pay' takes nothing of topic 'a': register it before"):
        handlers.correct(Booked, topic="a", of="pay", consumer="repay")(correcting)
    with pytest.raises(TypeError, match="'book' takes nothing of topic 'b'"):
        handlers.correct(Booked, topic="b", of="book", consumer="rebook")(correcting)
    with pytest.raises(TypeError, match="'ask' has applied has no records: take Applied"):
        handlers.correct(Booked, topic="(requests)", of="ask", consumer="reask")(correcting)
    with pytest.raises(TypeError, match="'ask' is the name of another consumer"):
        handlers.correct(Booked, topic="a", of="book", consumer="ask")(correcting)
    handlers.correct(Booked, topic="a", of="book", consumer="rebook")(correcting)
    with pytest.raises(TypeError, match="already takes 'booked'"):
        handlers.correct(Booked, topic="a", of="book", consumer="rebook")(correcting)
    with pytest.raises(TypeError, match="'rebook' takes records, or Applied"):
        handlers.correct(Applied, topic="a", of="book", consumer="rebook")(recalling)
    with pytest.raises(TypeError, match="'rebook' is the name of another consumer"):
        handlers.on(Booked, topic="a", consumer="rebook")(note)
    with pytest.raises(TypeError, match="'rebook' takes nothing of topic 'a'"):
        handlers.correct(Booked, topic="a", of="rebook", consumer="again")(correcting)
    with pytest.raises(TypeError, match=r"see handlers\.correct"):
        handlers.on(Applied, topic="a", consumer="recall")(recalling)


def test_a_handler_has_its_registered_options_and_sensible_defaults_otherwise() -> None:
    handlers = Handlers()
    patient = Policy(attempts=2, schedule=(1,))
    handlers.on(Booked, topic="a", consumer="plain")(note)
    handlers.on(
        Booked,
        topic="a",
        consumer="own",
        policy=patient,
        mode="deferred",
        timeout=0.5,
        takes_old=True,
    )(note)
    plain, own = handlers.of("a", "booked")
    assert (plain.policy, plain.mode, plain.timeout, plain.takes_old) == (
        Policy(),
        "immediate",
        5.0,
        False,
    )
    assert (own.policy, own.mode, own.timeout, own.takes_old) == (patient, "deferred", 0.5, True)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_time_out_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout is in seconds"):
        Handlers().on(Booked, topic="a", consumer="b", timeout=timeout)


def test_a_service_knows_its_input_topics_and_declared_event_topics() -> None:
    class Told(Event, type="told", topic="told-by-a-test"):
        pass

    class ToldMore(Told, type="told.more", topic="told-more-by-a-test"):
        pass

    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="b")(note)
    service = Service("tests", handlers=handlers, metadata=Base.metadata)
    assert {"a", "told-by-a-test", "told-more-by-a-test"} <= service.topics
    assert service.source == "/tests"


def test_a_function_that_is_no_coroutine_function_is_refused() -> None:
    def hasty(event: Event, tx: Transaction) -> None:
        pass

    with pytest.raises(TypeError, match="write `async def`"):
        Handlers().on(Booked, topic="a", consumer="b")(hasty)  # type: ignore[arg-type]


def test_a_field_whose_type_could_never_match_the_key_is_refused() -> None:
    class BookedByName(Event, type="booked.by.name"):
        flight: str
        seat: str

    with pytest.raises(TypeError, match=r"BookedByName\.seat is str, and Seat\.number holds int"):
        Handlers().on(BookedByName, topic="a", consumer="b", loads=Seat.by("flight", "seat"))


Price = NewType("Price", int)


@pytest.mark.parametrize(
    "annotation",
    [str | None, Annotated[str, Field(min_length=1)] | None, int | str, Annotated[str, "a"]],
)
def test_each_type_that_a_field_may_have_must_match_the_key(annotation: Any) -> None:
    seen = create_model("Seen", __base__=Booked, __cls_kwargs__={"type": "seen"}, seat=annotation)
    with pytest.raises(TypeError, match=r"Seen\.seat is str, and Seat\.number holds int"):
        Handlers().on(seen, topic="a", consumer="b", loads=Seat.by("flight", "seat"))


@pytest.mark.parametrize("annotation", [int | None, Annotated[int, "a"] | None, Price])
def test_an_optional_field_or_one_of_any_type_is_accepted(annotation: Any) -> None:
    seen = create_model("Seen", __base__=Booked, __cls_kwargs__={"type": "seen"}, seat=annotation)
    Handlers().on(seen, topic="a", consumer="b", loads=Seat.by("flight", "seat"))(note)


@pytest.mark.parametrize("kind", [TIMESTAMP(True, precision=0), TIMESTAMP(precision=3), TIME()])
def test_keys_whose_time_the_database_rounds_are_refused(kind: Any) -> None:
    class Local(DeclarativeBase):
        """Tables of this test."""

    class Timed(Aggregate, Local):
        """A row with a time in its key."""

        __tablename__ = "timed"

        flight: Mapped[Any] = mapped_column(kind, primary_key=True)

    with pytest.raises(TypeError, match="can't be the key of events"):
        Handlers().on(Booked, topic="a", consumer="b", loads=Timed.by("flight"))


def test_all_classes_whose_rows_cannot_be_locked_are_refused_at_startup() -> None:
    class Local(DeclarativeBase):
        """Tables of this test."""

    class General(Aggregate, ConcreteBase, Local):
        """A row."""

        __tablename__ = "general"
        __mapper_args__ = {"polymorphic_identity": "any", "concrete": True}  # noqa: RUF012

        flight: Mapped[str] = mapped_column(Text, primary_key=True)

    class Another(Aggregate, ConcreteBase, Local):
        """A row of another kind."""

        __tablename__ = "another"
        __mapper_args__ = {"polymorphic_identity": "other", "concrete": True}  # noqa: RUF012

        flight: Mapped[str] = mapped_column(Text, primary_key=True)

    handlers = Handlers()
    both: list[Loads[Any]] = [General.by("flight"), Another.by("flight")]
    handlers.on(Booked, topic="a", consumer="b", loads=both)(note)

    class Special(General):
        """A row of another table."""

        __tablename__ = "special"
        __mapper_args__ = {"polymorphic_identity": "special", "concrete": True}  # noqa: RUF012

        flight: Mapped[str] = mapped_column(Text, primary_key=True)
        version: Mapped[int] = mapped_column()

    class Further(Another):
        """A row of a further table."""

        __tablename__ = "further"
        __mapper_args__ = {"polymorphic_identity": "further", "concrete": True}  # noqa: RUF012

        flight: Mapped[str] = mapped_column(Text, primary_key=True)
        version: Mapped[int] = mapped_column()

    service = Service("tests", handlers=handlers, metadata=Local.metadata)
    with pytest.raises(Misconfigured, match=r"(?s)Another is loaded from .*General is loaded from"):
        service.check(SETTINGS)
    with pytest.raises(TypeError, match=r"General is loaded from a selectable in place of a table"):
        Handlers().on(Booked, topic="a", consumer="b", loads=General.by("flight"))


class Numbered(Aggregate, Base):
    """A row whose version SQLAlchemy counts."""

    __tablename__ = "numbered"

    flight: Mapped[str] = mapped_column(Text, primary_key=True)

    @declared_attr.directive
    @classmethod
    def __mapper_args__(cls) -> dict[str, object]:
        return {"version_id_col": cls.version}


class Place(Base):
    """A part of a row."""

    __tablename__ = "place"

    flight: Mapped[str] = mapped_column(Text, primary_key=True)
    version: Mapped[int]


seat, place = Seat.__table__, Place.__table__


class Joined(Aggregate, Base):
    """A row of which a part may be missing."""

    __table__ = outerjoin(seat, place, seat.c.flight_no == place.c.flight)

    flight = column_property(seat.c.flight_no, place.c.flight)
    version = column_property(seat.c.version, place.c.version)


class Whole(Aggregate, Base):
    """A row in two tables."""

    __table__ = join(seat, place, seat.c.flight_no == place.c.flight)

    flight = column_property(seat.c.flight_no, place.c.flight)
    version = column_property(seat.c.version, place.c.version)


def test_rows_of_two_tables_can_be_locked() -> None:
    Handlers().on(Booked, topic="a", consumer="b", loads=Whole.by("flight", "seat"))


@pytest.mark.parametrize(
    ("loads", "text"),
    [
        (Numbered.by("flight"), "Numbered.version counts events, and a version_id_col counts"),
        (Joined.by("flight", "seat"), "Joined is loaded from a selectable in place of a table"),
    ],
)
def test_rows_that_can_not_be_locked_are_refused(loads: Loads[Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Handlers().on(Booked, topic="a", consumer="b", loads=loads)


def test_gaps_that_make_no_sense_are_refused() -> None:
    handlers = Handlers()
    with pytest.raises(TypeError, match="a class that has the mixin Sequenced"):
        handlers.on(Freed, topic="a", consumer="b", gaps=Gaps())
    with pytest.raises(ValueError, match="wait is a number of seconds, not -1"):
        Gaps(wait=-1)
    with pytest.raises(ValueError, match="then is 'apply', 'die' or 'hold', not 'skip'"):
        Gaps(then="skip")  # type: ignore[arg-type]


def test_all_or_no_handlers_of_a_consumer_and_topic_use_sequences() -> None:
    handlers = Handlers()
    by_flight = Row.by("flight")
    handlers.on(Freed, topic="a", consumer="b", loads=by_flight, gaps=Gaps())(note)
    with pytest.raises(TypeError, match=r"go by the sequence of events \(gaps=\), or none does"):
        handlers.on(Booked, topic="a", consumer="b", loads=by_flight)(note)
    handlers.on(Booked, topic="a", consumer="c", loads=by_flight)(note)
    handlers.on(Booked, topic="d", consumer="b", loads=by_flight)(note)
    with pytest.raises(TypeError, match="Row follows the sequence of consumer 'b' and topic 'a'"):
        handlers.on(Freed, topic="d", consumer="c", loads=by_flight, gaps=Gaps())(note)


NO_NAMES = ["", " ", "a\x00b", "a\n", "\ud800", " a"]


@pytest.mark.parametrize("consumer", NO_NAMES)
def test_a_consumer_whose_name_could_not_be_stored_or_read_is_refused(consumer: str) -> None:
    handlers = Handlers()
    with pytest.raises(ValueError, match="a consumer is a name of characters that can be seen"):
        handlers.on(Booked, topic="a", consumer=consumer)


@pytest.mark.parametrize("topic", ["", ".", "a b", "a\x00", "(calls)", "x" * 250])
def test_a_topic_that_kafka_can_not_have_is_refused(topic: str) -> None:
    handlers = Handlers()
    with pytest.raises(ValueError, match="a topic is named by 1 to 249 letters"):
        handlers.on(Booked, topic=topic, consumer="b")
    with pytest.raises(ValueError, match="a topic is named by 1 to 249 letters"):
        handlers.on_batch(Booked, topic=topic, consumer="b")
    with pytest.raises(ValueError, match="a topic is named by 1 to 249 letters"):
        handlers.topic(topic, codec=Plain("booked", Position()))
    with pytest.raises(ValueError, match="a topic is named by 1 to 249 letters"):
        handlers.topic(topic, demands_types=True)


@pytest.mark.parametrize("event", [Event, Seat, "booked", Booked(flight="LH1", seat=7)])
def test_what_is_no_class_of_events_is_refused(event: Any) -> None:
    with pytest.raises(TypeError, match="is no event"):
        Handlers().on(event, topic="a", consumer="b")


class Changed(Event, Generic[T], type="changed"):
    """An event of something."""

    value: T


async def nothing() -> None: ...
async def event_only(event: Booked) -> None: ...
async def too_much(event: Booked, tx: Transaction, more) -> None: ...  # type: ignore[no-untyped-def]
async def by_name(event: Booked, tx: Transaction, *, more) -> None: ...  # type: ignore[no-untyped-def]
async def by_place(event: Booked, tx: Transaction, more: int, /) -> None: ...
async def swapped(tx: Transaction, event: Booked) -> None: ...
async def of_another(event: Freed, tx: Transaction) -> None: ...
async def of_others(event: "Freed | BookedToo", tx: Transaction) -> None: ...
async def of_something_else(event: Booked, tx: int) -> None: ...
async def of_batches(batch: EventBatch[Booked]) -> None: ...
async def of_other_batches(batch: EventBatch[Freed]) -> None: ...
async def without_annotations(event, tx): ...  # type: ignore[no-untyped-def]
async def with_a_default(event: Booked, tx: Transaction, more: int = 1) -> None: ...
async def of_anything(*arguments: Any) -> None: ...
async def of_any_event(event: Event, tx: object) -> None: ...
async def of_either(event: Freed | Booked, tx: Transaction) -> None: ...
async def of_unknown(event: "Nowhere", tx: Transaction) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def of_a_kind(event: E, tx: Transaction) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        *(nothing, event_only, too_much, by_name, by_place),
        *(swapped, of_another, of_others, of_something_else),
    ],
    ids=lambda function: function.__name__,
)
def test_an_unsuitable_handler_function_is_refused_with_the_signature_to_write(
    function: Any,
) -> None:
    with pytest.raises(
        TypeError, match=rf"async def {function.__name__}\(event: Booked, tx: Transaction\)"
    ):
        Handlers().on(Booked, topic="a", consumer="b")(function)


@pytest.mark.parametrize(
    "function",
    [
        without_annotations,
        with_a_default,
        of_anything,
        of_any_event,
        of_either,
        of_unknown,
        of_a_kind,
        partial(too_much, more=1),
    ],
    ids=lambda function: getattr(function, "__name__", "partial"),
)
def test_a_function_that_can_take_the_event_is_taken(function: Any) -> None:
    Handlers().on(Booked, topic="a", consumer="b")(function)


def test_a_decorator_below_may_call_the_function_with_more() -> None:
    def injecting(function: Function) -> Function:
        @wraps(function)
        async def call(event: Booked, tx: Transaction) -> None:
            await function(event, tx, 1)

        return call

    Handlers().on(Booked, topic="a", consumer="b")(injecting(too_much))


def test_functions_of_batches_are_looked_at_as_well() -> None:
    handlers = Handlers()
    handlers.on_batch(Booked, topic="a", consumer="b")(of_batches)
    with pytest.raises(TypeError, match=r"of_other_batches\(batch: EventBatch\[Booked\]\)"):
        handlers.on_batch(Booked, topic="b", consumer="b")(of_other_batches)  # type: ignore[arg-type]


def test_a_generic_event_is_taken_by_its_parameters() -> None:
    async def of_numbers(event: Changed[int], tx: Transaction) -> None: ...

    handlers = Handlers()
    handlers.on(Changed[int], topic="a", consumer="b")(of_numbers)
    assert handlers.of("a", "changed")[0].event is Changed[int]
    with pytest.raises(TypeError, match=r"of_numbers\(event: Changed\[str\], tx: Transaction\)"):
        handlers.on(Changed[str], topic="b", consumer="b")(of_numbers)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="both have the type 'changed'"):
        handlers.on(Changed[str], topic="a", consumer="c")(note)


HANDLERS = Handlers()


def wrapping(function: Function) -> Function:
    @wraps(function)
    async def again(*arguments: Any) -> None:
        await function(*arguments)

    return again


def wrapping_without_a_word(function: Function) -> Function:
    async def again(*arguments: Any) -> None:
        await function(*arguments)

    return again


@wrapping
@HANDLERS.on(Booked, topic="a", consumer="above")
async def decorated_above(event: Booked, tx: Transaction) -> None: ...


@wrapping_without_a_word
@HANDLERS.on(Booked, topic="a", consumer="above too")
async def decorated_above_too(event: Booked, tx: Transaction) -> None: ...


@HANDLERS.on(Booked, topic="a", consumer="below")
@wrapping
async def decorated_below(event: Booked, tx: Transaction) -> None: ...


@HANDLERS.on(Booked, topic="a", consumer="twice")
@HANDLERS.on(Booked, topic="b", consumer="twice")
async def registered_twice(event: Booked, tx: Transaction) -> None: ...


@HANDLERS.on(Booked, topic="a", consumer="first")
async def named_alike(event: Booked, tx: Transaction) -> None: ...


@HANDLERS.on(Booked, topic="a", consumer="second")  # type: ignore[no-redef]
async def named_alike(event: Booked, tx: Transaction) -> None: ...  # noqa: F811


HANDLERS.on(Booked, topic="a", consumer="by call")(wrapping(note))
SETTINGS = Settings(database_url="postgresql+asyncpg://u:p@h:1/d", kafka_bootstrap_servers="k:1")


def test_a_service_with_an_ineffective_decorator_does_not_start() -> None:
    assert HANDLERS.replaced == ["decorated_above", "decorated_above_too"]
    service = Service("tests", handlers=HANDLERS, metadata=Base.metadata)
    with pytest.raises(Misconfigured, match=r"a decorator above that of decorated_above would"):
        service.check(SETTINGS)


def test_a_service_whose_calls_would_never_be_made_does_not_start() -> None:
    handlers = Handlers()
    handlers.add(Handler(Booked, CALLS, "tell", (), note, Policy(), "call", timeout=5.0))
    assert not handlers.topics
    assert handlers.callers == {"tell"}
    service = Service("tests", handlers=handlers, metadata=Base.metadata)
    with pytest.raises(Misconfigured, match="'tell' is an effect, and no worker would make its"):
        service.check(SETTINGS)


def test_a_handler_timeout_longer_than_the_transactions_is_refused_at_startup() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="hasty", timeout=8.0)(note)
    handlers.add(Handler(Freed, CALLS, "tell", (), note, Policy(), "call", timeout=60.0))
    service = Service("tests", handlers=handlers, metadata=Base.metadata, workers=[BacklogWorkers])
    service.check(SETTINGS)
    handlers.on(Freed, topic="a", consumer="slow", timeout=8.5)(note)
    with pytest.raises(Misconfigured, match=r"'slow' has 8\.5 s, and PIPELINE_TRANS"):
        service.check(SETTINGS)


def test_consumers_of_a_topic_that_load_one_class_are_found() -> None:
    handlers = Handlers()
    handlers.on(Freed, topic="a", consumer="one", loads=Row.by("flight"))(note)
    handlers.on(Booked, topic="a", consumer="one", loads=Row.by("flight"))(note)
    handlers.on(Freed, topic="b", consumer="two", loads=Row.by("flight"))(note)
    assert list(handlers.rivals()) == []
    handlers.on(Booked, topic="a", consumer="three", loads=[Row.by("flight")])(note)
    [(found, advice)] = handlers.rivals()
    assert found.startswith("the consumers one, three of topic a load Row: events of one key keep")
    assert advice.endswith("or write Row.by(…, unordered=True) where no order is needed")


def test_a_consumer_that_needs_no_order_with_others_is_not_named() -> None:
    handlers = Handlers()
    handlers.on(Booked, topic="a", consumer="one", loads=Row.by("flight"))(note)
    handlers.on(Booked, topic="a", consumer="two", loads=Row.by("flight", unordered=True))(note)
    assert list(handlers.rivals()) == []
    handlers.on(Booked, topic="a", consumer="three", loads=Row.by("flight"))(note)
    [(found, _)] = handlers.rivals()
    assert "the consumers one, three of topic a" in found
