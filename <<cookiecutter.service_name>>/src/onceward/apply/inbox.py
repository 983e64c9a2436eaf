"""The inbox: markers of the messages that have already taken effect.

All functions run in a consume transaction, in the order of `docs/protocol.md`, except `register`,
which runs in a transaction of its own. Positions are in `positions.py`; generations are closed and
deleted in `retention/generations.py`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg

from onceward.errors import OncewardError
from onceward.events.message import FIRST_MILLISECOND, Message, time_of
from onceward.events.payload import HASH_VERSION
from onceward.handlers.policy import FOLLOWER, Decision, dead

from . import statements
from .backlog import Stored, mismatch_row
from .claim_check import DataUnavailable
from .item import Item, Known
from .outcome import BatchOutcome
from .positions import Generations
from .sequence import in_sequence
from .source import Source

_LONGEST_KEY = 255
"""Bytes of the longest key that is stored in markers, by which they are found."""
_SECONDS_AS_MILLISECONDS = range(1_000_000_000, FIRST_MILLISECOND)
"""Timestamps of 2001 to 2128 in seconds; in milliseconds these are January, February 1970."""


class TooOld(OncewardError):
    """The message is older than the oldest markers, so it may be a repeat."""

    def __init__(self, message: Message, since: datetime | None) -> None:
        at = message.timestamp
        text = f"its record is of {time_of(at)}, " if at >= 0 else ""
        text += f"its event of {message.time}, " if message.time is not None else ""
        text += (
            f"and the inbox remembers since {since}: whether it was applied before is not known."
            " Redrive it by its id if it was not; register the handler with takes_old=True to"
            " apply all such messages"
        )
        if at in _SECONDS_AS_MILLISECONDS:
            text += (
                f". The record's timestamp, {at}, looks like seconds, and has to be milliseconds:"
                f" for {time_of(1_000 * at)} let its producer send {1_000 * at}"
            )
        super().__init__(text)


async def register(
    connection: asyncpg.Connection, consumers: Iterable[str], release: str = ""
) -> None:
    """Store the generation in which each consumer begins, and the release that runs them.

    A registered one keeps its own generation, a known release the time of its first start.

    Call it before a consumer applies anything: then all its markers are in that generation or in
    later ones, also if the current one is closed meanwhile.
    """
    await connection.execute(statements.REGISTER_CONSUMERS, sorted(consumers), release)


class Found(NamedTuple):
    """The result of looking messages up in inbox and backlog."""

    new: list[Item]
    """Those that are to be applied, parked or dead."""
    waiting: Collection[bytes]
    """Order keys of which rows wait in the backlog."""
    in_backlog: set[bytes]
    """Marker keys of those that stay in the backlog: their new markers must be deleted."""


async def look_up(
    driver: asyncpg.Connection,
    generations: Generations,
    source: Source,
    outcome: BatchOutcome,
) -> Found:
    """Insert the markers of the messages, and find those that exist already.

    Duplicates and mismatches go into the outcome.
    """
    known = await mark(driver, generations, source.items)
    # The first of those with the same key is assigned last.
    first = {item.key: item for item in reversed(source.items) if item.key not in known}
    stored = await source.find(driver, list(first.values())) if first else Stored()
    known |= stored.known
    new: list[Item] = []
    unmarked = {*stored.known}
    for item in source.items:
        key = item.key
        if first.get(key) is item and key not in stored.known:
            if stored.overtaken and item.order_key in stored.overtaken:
                unmarked.add(key)
            else:
                new.append(item)
            continue
        before = known.get(key) or Known(first[key].message.hash, HASH_VERSION)
        if error := before.mismatch(item.message):
            outcome.letters.append(mismatch_row(item, error))
        else:
            outcome.duplicates.append(item)
    return Found(new, stored.waiting, unmarked)


async def mark(
    connection: asyncpg.Connection, generations: Generations, items: Sequence[Item]
) -> dict[bytes, Known]:
    """Insert markers of the messages; returns the markers that existed before, by key."""
    first = {item.key: item for item in reversed(items)}
    known: dict[bytes, Known] = {}
    if generations.oldest < generations.current:
        closed = generations.oldest, generations.current
        rows = await connection.fetch(
            statements.FIND_MARKERS_IN_CLOSED_GENERATIONS, *closed, list(first)
        )
        known = _by_key(rows)
    # Sorted, so that two transactions with the same keys wait for each other without a deadlock.
    new = [first[key] for key in sorted([key for key in first if key not in known])]
    inserted = await _insert(connection, generations.current, new) if new else set()
    if raced := list(first.keys() - known.keys() - inserted):
        known |= _by_key(
            await connection.fetch(
                statements.FIND_MARKERS_IN_CURRENT_GENERATION, generations.current, raced
            )
        )
    return known


async def _insert(
    connection: asyncpg.Connection, generation: int, items: Sequence[Item]
) -> set[bytes]:
    new = [
        (
            item.key,
            message.hash,
            item.consumer,
            message.source,
            message.id,
            message.type,
            message.topic,
            message.partition,
            message.offset,
            message.traceparent,
            message.key if len(message.key or b"") <= _LONGEST_KEY else None,
        )
        for item in items
        for message in (item.message,)
    ]
    return {
        row["key"]
        for row in await connection.fetch(statements.INSERT_MARKERS, generation, HASH_VERSION, new)
    }


def _by_key(rows: Iterable[asyncpg.Record]) -> dict[bytes, Known]:
    return {row["key"]: Known(row["hash"], row["hash_version"]) for row in rows}


async def too_old(
    driver: asyncpg.Connection, generations: Generations, new: Sequence[Item]
) -> dict[bytes, Decision]:
    """Return decisions, by marker key, on messages whose markers may have been deleted.

    None on those of consumers of which no marker was deleted, because they have begun since: they
    did not apply a message without a marker, however old it is.
    """
    if (since := generations.since) is None:
        return {}
    old = [
        item
        for item in new
        if _is_from_before(since, item.message) and not (item.was_young or item.handler.takes_old)
    ]
    if not old:
        return {}
    consumers = sorted({item.consumer for item in old})
    rows = await driver.fetch(statements.FIND_CONSUMERS_SINCE, consumers, generations.oldest)
    remembering = {row["consumer"] for row in rows}
    return {
        item.key: dead(item.handler.policy, "too old", TooOld(item.message, since))
        for item in old
        if item.consumer not in remembering
    }


def _is_from_before(time: datetime, message: Message) -> bool:
    """Whether the message is older, by the time of its record or its event."""
    return 0 <= message.timestamp < time.timestamp() * 1000 or (
        message.time is not None and message.time < time
    )


def to_handle(
    found: Found, decisions: Mapping[bytes, Decision], outcome: BatchOutcome
) -> list[Item]:
    """Return the messages to handle now; decisions on the others go into the outcome."""
    behind = set(found.waiting)
    now: list[Item] = []
    for item in in_sequence(found.new):
        decision = decisions.get(item.key)
        if decision is None and behind and item.order_key in behind:
            decision = FOLLOWER
        if decision is None and item.fault is not None:
            decision = dead(
                item.handler.policy,
                item.fault.reason
                if isinstance(item.fault, DataUnavailable)
                else item.undecoded or "invalid payload",
                item.fault,
                item.history,
            )
        if decision is None:
            now.append(item)
            continue
        outcome.decided.append((item, decision))
        if not decision.is_dead or decision.holds:
            behind.add(item.order_key)
    return now


async def unmark(
    connection: asyncpg.Connection, generations: Generations, keys: Sequence[bytes]
) -> None:
    """Delete markers that this transaction has inserted: the messages are in the backlog."""
    await connection.execute(statements.DELETE_MARKERS, generations.current, keys)


async def keep_results(
    connection: asyncpg.Connection, generations: Generations, results: Mapping[bytes, str]
) -> None:
    """Store the results of handlers, as JSON, in the markers that this transaction has inserted.

    A statement of its own: a marker is inserted before its handler is called, so that a transaction
    with the same message waits there.
    """
    await connection.execute(
        statements.STORE_RESULTS, generations.current, list(results), list(results.values())
    )
