"""Deadlocks: which keys one has delayed, over which rows, and what `loads=` has to declare."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice

import asyncpg

from onceward.errors import as_raised, leaves
from onceward.events.event import Event
from onceward.handlers.aggregate import Loads, canonical
from onceward.handlers.rows import Place

from .item import Item

_MOST = 5
"""Messages and rows that are named, at most."""
_QUOTED = re.compile(r'["“”„«»]\s?([^"“”„«»]+?)\s?["“”„«»]')
_PLACE = re.compile(r"\(\d+, ?\d+\)")
"""The place of a row in its table, which PostgreSQL names outside of quotes in all languages."""


def describe_deadlock(
    error: BaseException,
    items: Sequence[Item],
    culprits: Collection[Item] = (),
    places: Iterable[Place] = (),
) -> str:
    """Return over which table a deadlock was, which messages it has delayed, and what to write.

    `items` are the transaction's messages, `culprits` the ones whose call was ended, if it was a
    call, and `places` the rows that were locked, or waited for.
    """
    table = next(filter(None, map(_table_of, leaves(error))), None)
    over = f" over {table}" if table else ""
    delayed = culprits or items
    named = ", ".join(_named(item) for item in islice(delayed, _MOST))
    more = f" and {len(delayed) - _MOST:,} more" if len(delayed) > _MOST else ""
    return f"deadlock{over} of {named}{more}. {_advice(items, culprits, places)}"


def _named(item: Item) -> str:
    if item.record.key is None:
        return f"{item.name} without a key"
    return f"{item.name} of key {item.record.key[:100].decode('utf-8', 'backslashreplace')!r}"


def _table_of(error: BaseException) -> str | None:
    """Return the table of the row, or the index, over which a transaction was ended."""
    raised = as_raised(error)
    if not isinstance(raised, asyncpg.DeadlockDetectedError):
        return None
    context = (raised.context or "").partition("\n")[0]
    found = _QUOTED.findall(context)
    # Otherwise it is a statement, which may have values.
    return found[0] if len(found) == 1 and _PLACE.search(_QUOTED.sub("", context)) else None


def _advice(items: Sequence[Item], culprits: Collection[Item], places: Iterable[Place]) -> str:
    declared = {
        (loads.entity, canonical(loads.entity, loads.key_of(item.event)))
        for item in items
        if item.event is not None
        for loads in item.handler.loads
    }
    undeclared = [*islice((one for one in dict.fromkeys(places) if one not in declared), _MOST)]
    if not undeclared:
        return (
            "tx.load has locked no row that is not declared: declare by loads= also the rows that"
            " SQL of the handlers changes, and the rows of other handlers (docs/shared-rows.md)"
        )
    rows = ", ".join(f"{entity.__name__} {key!r}" for entity, key in undeclared)
    said = f"These rows were locked, and are not declared: {rows}"
    for item in chain(culprits, items):
        if missing := [*_declarations(item.event, undeclared)]:
            written = ", ".join(dict.fromkeys([*map(str, item.handler.loads), *missing]))
            type = item.message.type
            return f"{said}; let {item.consumer} declare for {type}: loads=[{written}]"
    return f"{said}; declare them by loads=, by fields of the events (docs/shared-rows.md)"


def _declarations(event: Event | None, places: Iterable[Place]) -> Iterator[str]:
    """Yield the declarations of those rows whose keys an event names."""
    if event is None:
        return
    given = {name: getattr(event, name) for name in type(event).model_fields}
    for entity, key in places:
        fields = [
            next((n for n, v in given.items() if type(v) is type(part) and v == part), None)
            for part in key
        ]
        names = tuple([name for name in fields if name is not None])
        if len(names) == len(key):
            yield str(Loads(entity, names))
