"""Aggregates: rows that handlers change in order, fetched and locked for a whole batch at once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, CITEXT, UUID
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, Session, mapped_column

from pipeline.events.event import Event

Key = tuple[Any, ...]
"""A primary key, one value a column."""


class Aggregate:
    """Mixin for a mapped class that is loaded by `loads=`, and that events are published `of`.

    `version` counts the events published of the row. The engine raises it in memory with every
    `tx.publish(…, of=row)`, so that the events of one batch carry 7, 8, 9.
    """

    version: Mapped[int] = mapped_column(sa.BigInteger, default=0)

    @classmethod
    def by(cls, *fields: str) -> "Loads[Self]":
        """Return `loads=` for a handler: the event's fields with the primary key, in its order."""
        return Loads(cls, fields)


A = TypeVar("A", bound=Aggregate)

_PRIMARY_KEYS: dict[type[Aggregate], tuple[str, ...]] = {}
_READERS: dict[type[Aggregate], tuple[Callable[[Any], Any], ...] | None] = {}
_READING: dict[type[Aggregate], Callable[[Aggregate], Key]] = {}
_LOCKING: dict[type[Aggregate], sa.Select[Any]] = {}


@dataclass(frozen=True)
class Loads(Generic[A]):
    """Declares the row that a handler is going to change, so that it is locked beforehand."""

    entity: type[A]
    fields: tuple[str, ...]

    def key_of(self, event: Event) -> Key:
        """Return the primary key that the event names."""
        return tuple([getattr(event, field) for field in self.fields])

    def check(self, event: type[Event]) -> None:
        """Raise `TypeError` if the event lacks a field or the key has another number of columns."""
        columns = primary_key(self.entity)
        canonical(self.entity, ())
        known = event.model_fields
        for field, column in zip(self.fields, columns, strict=False):
            kept = _python_type(self.entity, column)
            given = known[field].annotation if field in known else None
            if kept and isinstance(given, type) and not issubclass(given, kept):
                raise TypeError(
                    f"{event.__name__}.{field} is {given.__name__}, and {self.entity.__name__}."
                    f"{column} holds {kept.__name__}: a row would never be found; use one type"
                )
        if len(columns) != len(self.fields) or not known.keys() >= set(self.fields):
            raise TypeError(
                f"{self.entity.__name__}.by(…) must name the fields of {event.__name__} that hold"
                f" the primary key ({', '.join(columns)}). It names {', '.join(self.fields)};"
                f" {event.__name__} has {', '.join(known)}."
            )


def primary_key(entity: type[Aggregate]) -> tuple[str, ...]:
    """Return the attributes of the primary key, in the order of its columns."""
    if entity not in _PRIMARY_KEYS:  # needed for every message; SQLAlchemy takes 2 µs
        mapper = sa.inspect(entity)
        _PRIMARY_KEYS[entity] = tuple(
            mapper.get_property_by_column(column).key for column in mapper.primary_key
        )
    return _PRIMARY_KEYS[entity]


def _python_type(entity: type[Aggregate], attribute: str) -> type[Any] | None:
    try:
        return getattr(entity, attribute).type.python_type  # type: ignore[no-any-return]
    except NotImplementedError:
        return None


def key_of(row: Aggregate) -> Key:
    """Return the primary key of a row."""
    entity = type(row)
    if entity not in _READING:
        _READING[entity] = _build_reading(entity)
    return _READING[entity](row)


def _build_reading(entity: type[Aggregate]) -> Callable[[Aggregate], Key]:
    read, *more = (attrgetter(name) for name in primary_key(entity))
    if more:
        return attrgetter(*primary_key(entity))
    return lambda row: (read(row),)


def canonical(entity: type[Any], key: Key) -> Key:
    """Return the primary key with the values that the columns return for it."""
    if entity not in _READERS:
        _READERS[entity] = _build_readers(entity)
    readers = _READERS[entity]
    return key if readers is None else tuple([r(v) for r, v in zip(readers, key, strict=False)])


def record_key(entity: type[Any], values: Key) -> str:
    """Return the key of a record for a primary key: its text, or a JSON array of several.

    Values that are equal in the database have the same text.
    """
    texts = [_text(value) for value in canonical(entity, values)]
    return texts[0] if len(texts) == 1 else orjson.dumps(texts).decode()


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(value)


_EXACT = (
    *(sa.SmallInteger, sa.Integer, sa.BigInteger, sa.Uuid, sa.Date, sa.Boolean),
    *(sa.LargeBinary, sa.DateTime, UUID, BYTEA),
)
"""Types of columns whose equality is that of their values in Python."""


def _build_readers(entity: type[Aggregate]) -> tuple[Callable[[Any], Any], ...] | None:
    """Return the conversion of a value as the database returns it, by column; None: unchanged.

    Raises `TypeError` for a column whose equality is not that of its values in Python.
    """
    readers = tuple(
        _reader_of(entity, name, sa.inspect(entity).columns[name].type)
        for name in primary_key(entity)
    )
    return None if set(readers) == {_as_is} else readers


def _as_is(value: Any) -> Any:
    return value


def _reader_of(
    entity: type[Aggregate], name: str, kind: sa.types.TypeEngine[Any]
) -> Callable[[Any], Any]:
    if isinstance(kind, sa.Enum) and kind.enum_class is not None:
        by_text = dict(zip(kind.enums, kind.enum_class, strict=True))
        return lambda value: by_text.get(value, value) if isinstance(value, str) else value
    if isinstance(kind, sa.DateTime) and kind.timezone:
        return lambda value: value.astimezone(UTC) if isinstance(value, datetime) else value
    if isinstance(kind, sa.Numeric) and kind.asdecimal and kind.scale is not None:
        step = Decimal(1).scaleb(-kind.scale)
        return lambda value: Decimal(value).quantize(step)
    is_text = isinstance(kind, sa.String) and kind.collation is None
    if (is_text and not isinstance(kind, sa.CHAR | CITEXT)) or type(kind) in _EXACT:
        return _as_is
    raise TypeError(
        f"{entity.__name__}.{name} is {kind!r}, and can't be the key of events: values that"
        " PostgreSQL deems equal differ in Python. Use Text, String, an integer, Uuid, Date,"
        " Boolean, Enum of a class, DateTime(timezone=True) or Numeric with a scale"
    )


async def lock(session: AsyncSession, entity: type[A], keys: Collection[Key]) -> dict[Key, A]:
    """Fetch the rows that exist and lock them until the transaction ends, in the key's order.

    Keys are passed and returned in the form of `canonical`.
    """
    columns = {f"key_{place}": list(values) for place, values in enumerate(zip(*keys, strict=True))}
    found = {
        canonical(entity, key_of(row)): row
        for row in await session.run_sync(_fetch, _locking(entity), columns)
    }
    if not found.keys() <= set(keys):
        raise TypeError(
            f"{entity.__name__} has the key {next(iter(found))!r}, but was requested as"
            f" {next(iter(keys))!r}: use the type that the column holds"
        )
    return found


def _fetch(session: Session, statement: sa.Select[Any], values: dict[str, list[Any]]) -> list[Any]:
    # A joined relationship repeats rows.
    return list(Session.scalars(session, statement, values).unique())


def _locking(entity: type[A]) -> sa.Select[A]:
    """Return the statement that locks rows."""
    if entity not in _LOCKING:  # building it takes as long as sending it
        _LOCKING[entity] = _build_locking(entity)
    return _LOCKING[entity]


def _build_locking(entity: type[A]) -> sa.Select[A]:
    columns = [getattr(entity, name) for name in primary_key(entity)]
    # Arrays, not an IN list: the statement is the same for every number of keys.
    wanted = sa.select(
        *(
            sa.func.unnest(sa.bindparam(f"key_{place}", type_=ARRAY(column.type)))
            for place, column in enumerate(columns)
        )
    )
    return (
        sa.select(entity)
        .where(sa.tuple_(*columns).in_(wanted) if len(columns) > 1 else columns[0].in_(wanted))
        .order_by(*columns)
        .with_for_update(of=entity)
        .execution_options(populate_existing=True)
    )


def create(entity: type[A], key: Key) -> A:
    """Make a new row with this primary key and the defaults that its columns have in Python."""
    row = entity(**dict(zip(primary_key(entity), key, strict=True)))
    row.version = 0
    given = sa.inspect(row).dict
    for name, column in sa.inspect(entity).columns.items():
        default = column.default if isinstance(column, sa.Column) else None
        if name not in given and isinstance(default, sa.ColumnDefault) and default.is_scalar:
            setattr(row, name, default.arg)
    return row
