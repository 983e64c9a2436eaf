"""Calls of a release: those that wait, are dead or were discarded, and those that it has made."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from onceward import Policy, Reject, Service
from onceward.cli.commands import command_line
from onceward.cli.dead import CHUNK
from onceward.effects import EffectWorkers
from onceward.history import released
from onceward.history.commands import app
from onceward.history.released import Wanted

from tests.contract.bank import Base, Deposit
from tests.onceward.effects.applier import TOPIC, NewApplier, Outside
from tests.onceward.effects.conftest import new_calling_applier  # noqa: F401 (a fixture)
from tests.onceward.integration.conftest import Command


async def test_waiting_and_dead_calls_are_listed_with_completed_ones(
    new_calling_applier: NewApplier,  # noqa: F811
    commands: Callable[..., Command],
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outside = Outside({"policy": Policy(schedule=(3_600,))})
    outside.errors = {2: ValueError("later"), 3: Reject("no"), 4: Reject("no")}
    applier = await new_calling_applier(outside.handlers, topic=TOPIC, release="1.4.2")
    other = await new_calling_applier(outside.handlers, topic=TOPIC, release="1.4.3")
    await applier.apply(*(Deposit(number, f"{number}") for number in range(1, 5)))
    await applier.call()
    await db.execute(
        "UPDATE pipeline.backlog SET discarded_at = clock_timestamp(), discarded_by = 'ann'"
        " WHERE record_key = '4'"
    )
    await applier.apply(Deposit(5, "5"))  # which nobody has made yet
    await other.apply(Deposit(6, "6"))
    service = Service("applier", outside.handlers, Base.metadata, workers=[EffectWorkers])
    line = "affected", "calls", "--release", "1.4.2"
    command = commands(command_line(service, app))
    done = await command(*line, "--json")
    assert done.exit_code == 0, done.output
    listed = [json.loads(one) for one in done.stdout.splitlines()]
    states = {one["key"]["text"]: one["state"] for one in listed}
    wanted = {"1": "made", "2": "waiting", "3": "dead", "4": "discarded", "5": "waiting"}
    assert (states, len(listed)) == (wanted, 5)
    (dead,) = (one for one in listed if one["state"] == "dead")
    assert (dead["consumer"], dead["type"], dead["reason"]) == ("tell", "received", "rejected")
    done = await command(*line)
    assert "discarded" in done.stdout, done.output
    done = await command(*line, "--consumer", "another", "--json")
    assert done.stdout == ""
    monkeypatch.setattr(released, "CHUNK", 1)
    statement = released._LIST_CALLS.replace(f"LIMIT {CHUNK}", "LIMIT 1")
    monkeypatch.setattr(released, "_LIST_CALLS", statement)
    statement = released._LIST_MARKERS.replace(f"LIMIT {CHUNK}", "LIMIT 1")
    monkeypatch.setattr(released, "_LIST_MARKERS", statement)
    chunks: list[Any] = [rows async for rows in released.calls(db, Wanted(release="1.4.2"))]
    assert sorted(len(rows) for rows in chunks) == [1] * 5


async def test_a_call_that_was_made_is_in_the_timeline_of_its_key(
    new_calling_applier: NewApplier,  # noqa: F811
    commands: Callable[..., Command],
) -> None:
    outside = Outside()
    applier = await new_calling_applier(outside.handlers, topic=TOPIC, release="1.4.2")
    await applier.apply(Deposit(1), Deposit(2, "bob"))
    await applier.call()
    service = Service("applier", outside.handlers, Base.metadata, workers=[EffectWorkers])
    done = await commands(command_line(service, app))("timeline", "ada", "--json")
    assert done.exit_code == 0, done.output
    *found, _ = (json.loads(line) for line in done.stdout.splitlines())
    by = {one["what"]: one for one in found if one["release"]}
    assert by.keys() == {"applied", "called"}
    called = by["called"]
    assert (called["where"], called["release"]) == ("tell", "1.4.2")
    assert called["event"].startswith("received ")
    assert datetime.fromisoformat(by["applied"]["at"]) <= datetime.fromisoformat(called["at"])
