"""The registration of effects: what it tells the registry of handlers, and what it refuses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import MetaData

from onceward import Event, Handlers, Misconfigured, Service, Transaction
from onceward.effects import Call, Effects, EffectWorkers
from onceward.effects.registration import Effect
from onceward.settings import Settings


class Booked(Event, type="booked"):
    """A seat was booked."""

    seat: int


async def note(event: Event, tx: Transaction) -> None: ...
async def call_out(event: Booked, call: Call) -> None: ...
async def swapped(call: Call, event: Booked) -> None: ...
async def event_only(event: Booked) -> None: ...
async def asking(event: Booked, call: Call) -> bool:
    return True


@pytest.fixture
def handlers() -> Handlers:
    """Return an empty registry."""
    return Handlers()


@pytest.fixture
def effects(handlers: Handlers) -> Effects:
    """Return its effects."""
    return Effects(handlers)


def test_effects_are_consumers_of_no_topic(handlers: Handlers, effects: Effects) -> None:
    handlers.on(Booked, topic="a", consumer="b")(note)
    effects.on(Booked, consumer="c")(call_out)
    assert handlers.topics == {"a"}
    assert handlers.consumers == {"b", "c"}
    assert handlers.callers == {"c"}
    assert handlers.call_types == {"booked": Booked}


def test_effects_stay_when_topics_have_other_names(handlers: Handlers, effects: Effects) -> None:
    handlers.on(Booked, topic="a", consumer="b")(note)
    effects.on(Booked, consumer="c", repeatable=False)(call_out)
    renamed = handlers.with_topics(lambda topic: f"test-{topic}")
    assert renamed.topics == {"test-a"}
    assert [one for one in renamed if one.mode == "call"] == [
        one for one in handlers if one.mode == "call"
    ]


def test_an_effect_that_makes_no_sense_is_refused(effects: Effects) -> None:
    with pytest.raises(TypeError, match="give repeatable=False, too"):
        effects.on(Booked, consumer="c", ask=asking)
    with pytest.raises(ValueError, match="per_second is a number of calls, not 0"):
        effects.on(Booked, consumer="c", per_second=0)
    with pytest.raises(ValueError, match="a consumer is a name of characters that can be seen"):
        effects.on(Booked, consumer="")
    effects.on(Booked, consumer="c")(call_out)
    with pytest.raises(TypeError, match="consumer 'c' already takes 'booked'"):
        effects.on(Booked, consumer="c")(call_out)


def test_an_effect_and_a_consumer_of_topics_cannot_share_a_name(
    handlers: Handlers, effects: Effects
) -> None:
    handlers.on(Booked, topic="a", consumer="b")(note)
    with pytest.raises(TypeError, match="'b' is an effect and a consumer of a topic"):
        effects.on(Booked, consumer="b")(call_out)


def test_functions_that_can_not_take_what_they_are_given_are_refused(effects: Effects) -> None:
    wrong: Any
    for wrong in swapped, event_only:
        with pytest.raises(TypeError, match=rf"{wrong.__name__}\(event: Booked, call: Call\)"):
            effects.on(Booked, consumer="c")(wrong)
    wrong = event_only
    with pytest.raises(TypeError, match=r"event_only\(event: Booked, call: Call\)"):
        effects.on(Booked, consumer="c", repeatable=False, ask=wrong)
    wrong = note
    with pytest.raises(TypeError, match=r"note\(event: Booked, tx: Transaction, result: Any\)"):
        effects.on(Booked, consumer="c", then=wrong)


def test_what_comes_after_a_call_is_a_coroutine_function(effects: Effects) -> None:
    def then(event: Booked, tx: Transaction, result: object) -> None: ...

    with pytest.raises(TypeError, match="write `async def`"):
        effects.on(Booked, consumer="b", then=then)  # type: ignore[arg-type]


@dataclass
class Resources:
    """What effects take here."""

    rates: dict[str, int]


@asynccontextmanager
async def open_resources() -> AsyncIterator[Resources]:
    """Yield the resources."""
    yield Resources({"usd": 92})


async def test_a_call_takes_resources_and_so_do_ask_and_then(
    handlers: Handlers, effects: Effects
) -> None:
    async def ask(event: Booked, call: Call, rates: dict[str, int]) -> bool:
        return rates["usd"] == 92

    async def then(event: Booked, tx: Transaction, result: int, rates: dict[str, int]) -> int:
        return rates["usd"] + result

    @effects.on(Booked, consumer="c", repeatable=False, ask=ask, then=then)
    async def call_rated(event: Booked, call: Call, *, rates: dict[str, int]) -> int:
        return rates["usd"]

    workers = [EffectWorkers]
    service = Service("tests", handlers, MetaData(), workers=workers, resources=open_resources)
    async with service.opened() as opened:
        (one,) = opened.handlers
        assert isinstance(one, Effect)
        assert one.ask
        assert one.then
        assert await one.function(None, None) == 92
        assert await one.ask(None, None) is True
        assert await one.then(None, None, 1) == 93


def test_what_ask_and_then_take_is_checked_as_well(handlers: Handlers, effects: Effects) -> None:
    async def ask(event: Booked, call: Call, rate: float) -> bool:
        return True

    async def then(event: Booked, tx: Transaction, result: int, rate: complex) -> None: ...

    effects.on(Booked, consumer="c", repeatable=False, ask=ask, then=then)(call_out)
    workers = [EffectWorkers]
    service = Service("tests", handlers, MetaData(), workers=workers, resources=open_resources)
    url = "postgresql+asyncpg://u:p@h:1/d"
    with pytest.raises(Misconfigured) as raised:
        service.check(Settings(database_url=url, kafka_bootstrap_servers="k:1"))
    asking, following = str(raised.value).splitlines()
    assert asking.startswith("consumer 'c': ask takes rate: builtins.float, and no field of")
    assert following.startswith("consumer 'c': then takes rate: builtins.complex, and no field of")
