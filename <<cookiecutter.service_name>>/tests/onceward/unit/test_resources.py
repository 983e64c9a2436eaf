"""Resources: which field a parameter takes, what is refused before a start, and how they open."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import pytest
from sqlalchemy import MetaData

from onceward import Event, EventBatch, Handlers, Misconfigured, Service, Transaction
from onceward.servers import retrying
from onceward.settings import Settings

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypes

SETTINGS = Settings(database_url="postgresql+asyncpg://u:p@h:1/d", kafka_bootstrap_servers="k:1")


class Booked(Event, type="booked"):
    """A seat was booked."""

    seat: int


class Bank:
    """A client."""


class Savings(Bank):
    """Another one."""


class Clock(Protocol):
    """What tells the time."""

    def now(self) -> float: ...


class Fixed:
    """A clock."""

    def now(self) -> float:
        return 5.0


Main = Annotated[Bank, "main"]
Other = Annotated[Bank, "other"]


@dataclass(frozen=True, slots=True)
class Resources:
    """One field of each kind of type, two of `int`."""

    bank: Bank
    clock: "Clock"
    rates: dict[str, int]
    spare: Savings | None
    main: Main
    other: Other
    first: int
    second: int


OPEN = Resources(Bank(), Fixed(), {"usd": 92}, None, Bank(), Bank(), 1, 2)


@asynccontextmanager
async def open_resources() -> AsyncIterator[Resources]:
    """Yield the resources."""
    yield OPEN


def service_of(*functions: Callable[..., Any], opening: Any = open_resources) -> Service:
    handlers = Handlers()
    for place, function in enumerate(functions):
        handlers.on(Booked, topic="a", consumer=f"consumer {place}")(function)
    return Service("tests", handlers, MetaData(), resources=opening)


async def none(event: Booked, tx: Transaction) -> list[object]:
    return []


async def some(event: Booked, tx: Transaction, bank: Bank, now: Clock) -> list[object]:
    return [bank, now]


async def others(
    event: Booked,
    tx: Transaction,
    table: dict[str, int],
    *,
    spare: "Savings | None",
    one: Main,
    two: Other,
    more: str = "",
) -> list[object]:
    return [table, spare, one, two]


async def test_a_parameter_takes_the_field_with_the_same_annotation() -> None:
    service = service_of(none, some, others)
    service.check(SETTINGS)
    async with service.opened() as opened:
        handlers = opened.handlers.of("a", "booked")
        assert handlers[0].function is none, "a call costs nothing more"
        found: list[Any] = [await one.function(Booked(seat=1), None) for one in handlers]
    expected: list[list[object]] = [
        [],
        [OPEN.bank, OPEN.clock],
        [OPEN.rates, OPEN.spare, OPEN.main, OPEN.other],
    ]
    for values, those in zip(found, expected, strict=True):
        assert [id(one) for one in values] == [id(one) for one in those]
    assert [one.function for one in service.handlers] == [none, some, others]


async def test_a_handler_of_batches_and_a_correction_take_resources_too() -> None:
    handlers = Handlers()

    @handlers.on_batch(Booked, topic="a", consumer="count")
    async def count(batch: EventBatch[Booked], bank: Bank) -> None:
        assert bank is OPEN.bank

    @handlers.correct(Booked, topic="a", of="count", consumer="recount")
    async def recount(event: Booked, tx: Transaction, bank: Bank) -> None:
        assert bank is OPEN.bank

    service = Service("tests", handlers, MetaData(), resources=open_resources)
    async with service.opened() as opened:
        batches, correction = opened.handlers
        await batches.function(None)
        await correction.function(None, None)
    assert opened.handlers.corrections == {"recount": "count"}
    opened.check(SETTINGS)


async def of_no_field(event: Booked, tx: Transaction, rate: float) -> None: ...
async def of_two(event: Booked, tx: Transaction, number: int) -> None: ...
async def of_a_subclass(event: Booked, tx: Transaction, bank: Savings) -> None: ...
async def of_type_checkers(event: Booked, tx: Transaction, rate: "OnlyForTypes") -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (of_no_field, r"takes rate: builtins\.float, and no field of Resources has this type; it"),
        (of_no_field, r"it has bank: .*\.Bank, clock: .*\.Clock, rates: dict\[str, int\], spare: "),
        (of_two, r"takes number: builtins\.int, and more than one field of Resources has this"),
        (of_a_subclass, r"takes bank: \S+\.Savings, and no field of Resources has this type"),
        (of_type_checkers, r"takes rate, and its annotations can't be evaluated \(NameError"),
    ],
)
async def test_a_service_without_exactly_one_such_field_does_not_start(
    function: Callable[..., Any], text: str
) -> None:
    service = service_of(none, function)
    name = f"consumer 'consumer 1': {function.__name__} "
    with pytest.raises(Misconfigured, match=f"^{name}.*{text}"):
        service.check(SETTINGS)
    with pytest.raises(Misconfigured, match=f"^{name}"):
        async with service.opened():
            pytest.fail("they were opened")


def test_all_that_is_wrong_is_reported_at_once() -> None:
    with pytest.raises(Misconfigured) as raised:
        service_of(of_two, of_no_field).check(SETTINGS)
    assert [line.split(":")[0] for line in str(raised.value).splitlines()] == [
        "consumer 'consumer 0'",
        "consumer 'consumer 1'",
    ]


def test_a_service_without_resources_has_none_to_take() -> None:
    with pytest.raises(Misconfigured, match=r"Bank, and the service has no resources: Service\("):
        service_of(some, opening=None).check(SETTINGS)


@asynccontextmanager
async def of_no_class() -> AsyncIterator[Bank]:
    yield Bank()


async def bare() -> AsyncIterator[Resources]:
    yield OPEN


@asynccontextmanager
async def unannotated():  # type: ignore[no-untyped-def]
    yield OPEN


@pytest.mark.parametrize("opening", [of_no_class, bare, unannotated, lambda: OPEN])
def test_what_opens_no_dataclass_is_refused_with_what_to_write(opening: Any) -> None:
    with pytest.raises(Misconfigured, match="write `@asynccontextmanager` and `async def open_"):
        service_of(none, opening=opening).check(SETTINGS)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "pause", lambda failures: 0.0)


def failing(errors: list[Exception], log: list[str]) -> Callable[[], Any]:
    """Return what raises these errors, one for each time, before it opens the resources."""

    @asynccontextmanager
    async def opening() -> AsyncIterator[Resources]:
        if errors:
            raise errors.pop(0)
        log.append("opened")
        yield OPEN
        log.append("closed")

    return opening


async def test_while_a_server_is_away_they_are_opened_again(quick: None) -> None:
    log, reasons = list[str](), list[str]()
    service = service_of(some, opening=failing([ConnectionError("cut off"), TimeoutError()], log))
    async with service.opened(reasons.append) as opened:
        assert log == ["opened"]
        assert len([*opened.handlers]) == 1
    assert log == ["opened", "closed"]
    assert reasons == [
        "the resources are not open yet",
        "opening: ConnectionError: cut off",
        "opening: TimeoutError",
    ]


async def test_another_error_is_raised_at_once(quick: None) -> None:
    log = list[str]()
    with pytest.raises(LookupError, match="no such bank"):
        async with service_of(some, opening=failing([LookupError("no such bank")], log)).opened():
            pass
    assert log == []


async def test_unused_resources_change_nothing() -> None:
    service = service_of(none, opening=None)
    async with service.opened(pytest.fail) as opened:
        assert opened is service


def test_a_partial_has_what_it_was_made_with() -> None:
    service = service_of(partial(some, bank=Bank(), now=Fixed()), opening=None)
    service.check(SETTINGS)
    replace(service, resources=open_resources).check(SETTINGS)
