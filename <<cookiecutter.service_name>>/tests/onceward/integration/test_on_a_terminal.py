"""Commands on a terminal: what they ask, what they clear, and what a hostile text does to it."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from onceward.operators import stopping

from .bank import Bank
from .processes import APP, environment
from tests.servers.terminals import CTRL_C, END_OF_INPUT, OnTerminal, terminals
from tests.servers.waiting import eventually

CLEARED = "\x1b[2J\x1b[H"
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe"
"""Clears the screen, names the window, rings, and shows what follows from right to left."""
BECAUSE = "--because", "wrong prices"


@pytest.fixture
async def on_terminal(bank: Bank, database_url: str, kafka: str) -> AsyncIterator[OnTerminal]:
    """Start commands of the bank, each on a terminal."""
    variables = environment(bank, database_url=database_url, kafka_bootstrap_servers=kafka)
    with terminals(APP, variables) as start:
        yield start


async def test_status_is_shown_on_a_cleared_screen_until_ctrl_c(
    on_terminal: OnTerminal, bank: Bank
) -> None:
    watching = on_terminal("status", "--watch")
    await eventually(lambda: watching.raw.count(f"{CLEARED}{bank.name}  ") >= 2)
    watching.type(CTRL_C)
    assert await watching.ended() == 130
    assert "Traceback" not in watching.shown
    once = on_terminal("status")
    assert await once.ended() == 0
    assert f"\n{bank.name}  " in f"\n{once.shown}"
    assert CLEARED not in once.raw


@pytest.mark.parametrize("typed", ["n\n", "\n", END_OF_INPUT, CTRL_C])
async def test_a_topic_is_paused_after_a_yes_and_no_other_answer(
    on_terminal: OnTerminal, bank: Bank, db: asyncpg.Connection, typed: str
) -> None:
    question = f"topic {bank.deposits} will be paused. Go on? [y/N]:"
    for answer, code in ((typed, 1), ("y\n", 0)):
        pausing = on_terminal("pause", "topic", bank.deposits, *BECAUSE)
        await pausing.shows(question)
        assert await stopping.listed(db) == []
        pausing.type(answer)
        assert await pausing.ended() == code
        assert ("Aborted" in pausing.shown) == bool(code)
        assert (f"topic {bank.deposits} is paused" in pausing.shown) == (not code)
    ((name, why),) = [(one.name, one.why) for one in await stopping.listed(db)]
    assert (name, why) == (bank.deposits, "wrong prices")


async def test_a_hostile_key_does_nothing_to_the_terminal(
    on_terminal: OnTerminal, db: asyncpg.Connection
) -> None:
    pausing = on_terminal("pause", "key", HOSTILE, "--because", HOSTILE)
    await pausing.shows("Go on? [y/N]:")
    pausing.type("y\n")
    status, letters = on_terminal("status"), on_terminal("dead", "list", "--waiting")
    for one in (pausing, status, letters):
        assert await one.ended() == 0, one.shown
        assert "\\u001b" in one.shown
        assert {letter for letter in one.shown if not letter.isprintable()} <= {"\n"}
    assert {bytes.fromhex(one.key).decode() for one in await stopping.listed(db)} == {HOSTILE}
