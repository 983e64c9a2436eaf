"""Sorts messages into new ones, duplicates, mismatches, too old ones and those that wait."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import asyncpg

from pipeline.events.message import Message
from pipeline.events.payload import HASH_VERSION
from pipeline.handlers.policy import FOLLOWER, Decision, dead

from . import inbox
from .claim_check import DataUnavailable
from .filters import Filters
from .inbox import Generations
from .item import IdentityMismatch, Item, Known
from .outcome import BatchOutcome
from .positions import time_of
from .source import Source

_SECONDS_AS_MILLISECONDS = range(1_000_000_000, 5_000_000_000)
"""Timestamps of 2001 to 2128 in seconds; in milliseconds these are January, February 1970."""


class TooOld(Exception):
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


class Found(NamedTuple):
    """The result of looking messages up in inbox and backlog."""

    new: list[Item]
    """Those that are to be applied, parked or dead."""
    waiting: set[bytes]
    """Order keys of which rows wait in the backlog."""
    in_backlog: set[bytes]
    """Marker keys of those that are in the backlog: their new markers must be deleted."""


async def look_up(
    driver: asyncpg.Connection,
    generations: Generations,
    filters: Filters,
    source: Source,
    outcome: BatchOutcome,
) -> Found:
    """Insert the markers of the messages, and find those that exist already.

    Duplicates and mismatches go into the outcome.
    """
    known = await inbox.mark(driver, generations, source.items, filters)
    first: dict[bytes, Item] = {}
    for item in source.items:
        if item.key not in known:
            first.setdefault(item.key, item)
    in_backlog, waiting = await source.find(driver, list(first.values())) if first else ({}, set())
    known |= in_backlog
    new: list[Item] = []
    for item in source.items:
        key = item.key
        if first.get(key) is item and key not in in_backlog:
            new.append(item)
            continue
        before = known.get(key) or Known(first[key].message.hash, HASH_VERSION)
        try:
            before.check(item.message)
        except IdentityMismatch as error:
            outcome.mismatched.append((item, error))
        else:
            outcome.duplicates.append(item)
    return Found(new, waiting, set(in_backlog))


async def too_old(
    driver: asyncpg.Connection, generations: Generations, new: Sequence[Item]
) -> dict[bytes, Decision]:
    """Return decisions, by marker key, on messages whose markers may have been deleted."""
    old = [
        item
        for item in new
        if generations.forgot(item.message) and not (item.was_young or item.handler.takes_old)
    ]
    if not old:
        return {}
    consumers = {item.consumer for item in old}
    remembering = await inbox.remembers_all(driver, generations, consumers)
    return {
        item.key: dead(item.handler.policy, "too old", TooOld(item.message, generations.since))
        for item in old
        if item.consumer not in remembering
    }


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
                item.fault.reason if isinstance(item.fault, DataUnavailable) else "invalid payload",
                item.fault,
                attempts=item.attempts,
            )
        if decision is None:
            now.append(item)
            continue
        outcome.decided.append((item, decision))
        if not decision.is_dead or decision.holds:
            behind.add(item.order_key)
    return now


def in_sequence(items: Sequence[Item]) -> Sequence[Item]:
    """Sort the events of each key by their sequence, if their handler has `gaps`."""
    places: dict[bytes, list[int]] = {}
    for place, item in enumerate(items):
        if item.handler.gaps is not None:
            places.setdefault(item.order_key, []).append(place)
    if not places:
        return items
    ordered = list(items)
    for of_key in places.values():
        in_order = sorted((items[place] for place in of_key), key=lambda item: item.sequence)
        for place, item in zip(of_key, in_order, strict=True):
            ordered[place] = item
    return ordered
