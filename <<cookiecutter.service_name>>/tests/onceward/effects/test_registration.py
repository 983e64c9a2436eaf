"""The registration of effects: what it tells the registry of handlers, and what it refuses."""

from typing import Any

import pytest

from onceward import Event, Handlers, Transaction
from onceward.effects import Call, Effects


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


def test_a_name_is_that_of_an_effect_or_of_a_consumer_of_topics(
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
