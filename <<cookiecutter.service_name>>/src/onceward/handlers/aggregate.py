"""Aggregates: rows that handlers change in order, fetched and locked for a whole batch at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Self, TypeVar, Union, get_args, get_origin

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, Mapper, class_mapper, mapped_column, selectin_polymorphic
from sqlalchemy.orm.attributes import instance_state

from onceward.events.event import Event

from .columns import cache_by_class, column_of, primary_key

Key = tuple[Any, ...]
"""A primary key, one value a column."""


class Aggregate:
    """Mixin for a mapped class that is loaded by `loads=`, and that events are published `of`.

    `version` counts the events published of the row. The engine raises it in memory with every
    `tx.publish(…, of=row)`, so that the events of one batch carry 7, 8, 9.
    """

    version: Mapped[int] = mapped_column(sa.BigInteger, default=0)

    @classmethod
    def by(cls, *fields: str, unordered: bool = False) -> "Loads[Self]":
        """Return `loads=` for a handler: the event's fields with the primary key, in its order.

        With `unordered=True` the start and `service doctor` do not warn that another consumer of
        the topic also loads such rows: the handler needs no order with it.
        """
        return Loads(cls, fields, unordered)


A = TypeVar("A", bound=Aggregate)


@dataclass(frozen=True)
class Loads(Generic[A]):
    """Declares the row that a handler is going to change, so that it is locked beforehand."""

    entity: type[A]
    """The mapped class."""
    fields: tuple[str, ...]
    """The event's fields with the primary key, in its order."""
    unordered: bool = False
    """Whether the handler needs no order with other consumers that load such rows."""

    def __str__(self) -> str:
        """Return the declaration as it is written."""
        options = ["unordered=True"] if self.unordered else []
        return f"{self.entity.__name__}.by({', '.join([*map(repr, self.fields), *options])})"

    @property
    def table(self) -> str:
        """Return the name of the table, with its schema if the class names one."""
        return str(sa.inspect(self.entity).local_table)

    def key_of(self, event: Event) -> Key:
        """Return the primary key that the event names."""
        return tuple([getattr(event, field) for field in self.fields])

    def check(self, event: type[Event]) -> None:
        """Raise `TypeError` if the event lacks a field, the key has another number of columns, or
        the rows can't be locked."""
        mapper, columns = _lockable(self.entity), primary_key(self.entity)
        canonical(self.entity, ())
        known = event.model_fields
        for field, column in zip(self.fields, columns, strict=False):
            given = known[field].annotation if field in known else None
            try:
                kept = mapper.columns[column].type.python_type
            except NotImplementedError:
                continue
            for one in _members(given):
                if not issubclass(one, kept | NoneType):
                    raise TypeError(
                        f"{event.__name__}.{field} is {one.__name__}, and {self.entity.__name__}."
                        f"{column} holds {kept.__name__}: a row would never be found; use one type"
                    )
        if len(columns) != len(self.fields) or not known.keys() >= set(self.fields):
            raise TypeError(
                f"{self.entity.__name__}.by(…) must name the fields of {event.__name__} that hold"
                f" the primary key ({', '.join(columns)}). It names {', '.join(self.fields)};"
                f" {event.__name__} has {', '.join(known)}."
            )


def _members(annotation: Any) -> Iterable[type[Any]]:
    """Return the classes of which values of a type can be, as far as that is known."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for one in get_args(annotation) for kind in _members(one)]
    if get_origin(annotation) is Annotated:
        return _members(annotation.__origin__)
    return [annotation] if isinstance(annotation, type) else []


Declared = Loads[Any] | Sequence[Loads[Any]] | None
"""What `loads=` takes: one declaration, or several."""


def declared(loads: Declared, event: type[Event]) -> Sequence[Loads[Any]]:
    """Return the declarations. Raises `TypeError` for others, and as `Loads.check`."""
    rows = tuple(loads or ()) if isinstance(loads, Iterable | None) else (loads,)
    for one in rows:
        if not isinstance(one, Loads):
            raise TypeError(f"loads= takes what Class.by(…) returns, not {one!r}")
        one.check(event)
    return rows


def key_of(row: Aggregate) -> Key:
    """Return the primary key of a row."""
    return tuple([getattr(row, name) for name in primary_key(type(row))])


def canonical(entity: type[Any], key: Key) -> Key:
    """Return the primary key with the values that the columns return for it.

    Raises `TypeError` for a column whose equality is not that of its values in Python.
    """
    readers = _readers(entity)
    if readers is None:
        return key
    return tuple([v if r is None else r(v) for r, v in zip(readers, key, strict=False)])


@cache_by_class
def _readers(entity: type[Any]) -> tuple[Callable[[Any], Any] | None, ...] | None:
    """Return by column what the database returns for a value; None: the same for all of them."""
    readers, mapper = [], sa.inspect(entity)
    for name in primary_key(entity):
        kind = mapper.columns[name].type
        column = column_of(kind)
        if column is None:
            raise TypeError(
                f"{entity.__name__}.{name} is {kind!r}, and can't be the key of events: values that"
                " PostgreSQL deems equal differ in Python. Use Text, String, an integer, Uuid,"
                " Date, Boolean, Enum of a class, DateTime(timezone=True) or Numeric with a scale"
            )
        readers.append(column.returned)
    return tuple(readers) if any(readers) else None


def record_key(key: Key) -> str:
    """Return the key of a record for a primary key: its text, or a JSON array of several.

    Values that are equal in the database have the same text, as `canonical` returns them.
    """
    texts = [str(value.value if isinstance(value, Enum) else value) for value in key]
    return texts[0] if len(texts) == 1 else orjson.dumps(texts).decode()


@cache_by_class  # building it takes as long as sending it
def locking(entity: type[Aggregate]) -> sa.Select[Any]:
    """Return the statement that locks rows: their keys are arrays, `key_0` for the first column.

    The lock is `FOR NO KEY UPDATE`: other transactions may insert rows that refer to these. Under
    `FOR UPDATE` two transactions that each refer to the other's row would deadlock. A statement
    that deletes a row, or changes its key, takes the stronger lock itself.
    """
    class_mapper(entity)  # configures it, by which some get their selectable
    mapper = _lockable(entity)
    base = _base_of(mapper)  # of a class in several tables: the others may have no row
    derived = {one for one in mapper.self_and_descendants if _base_of(one) is base} - {mapper}
    columns = [getattr(entity, name) for name in primary_key(entity)]
    # Arrays, not an IN list: the statement is the same for every number of keys.
    wanted = sa.select(
        *(
            sa.func.unnest(sa.bindparam(f"key_{place}", type_=ARRAY(column.type)))
            for place, column in enumerate(columns)
        )
    )
    select = sa.select(entity)
    if derived and mapper.with_polymorphic is None:  # their columns would be loaded later
        select = select.options(selectin_polymorphic(entity, [one.class_ for one in derived]))
    return (
        select.where(
            sa.tuple_(*columns).in_(wanted) if len(columns) > 1 else columns[0].in_(wanted)
        )
        .order_by(*columns)
        .with_for_update(of=base.local_table, key_share=True)
        .execution_options(populate_existing=True)
    )


def _lockable(entity: type[Any]) -> Mapper[Any]:
    """Return the mapper of a class. Raises `TypeError` if its rows can't be locked."""
    mapper: Mapper[Any] = sa.inspect(entity)
    of_union = mapper.with_polymorphic and mapper.with_polymorphic[1] is not None
    if of_union or not _has_rows(_base_of(mapper).local_table):
        raise TypeError(
            f"{entity.__name__} is loaded from a selectable in place of a table, whose rows can't"
            " be locked: load the classes of its tables"
        )
    if mapper.version_id_col is not None and mapper.version_id_col is mapper.columns.get("version"):
        raise TypeError(
            f"{entity.__name__}.version counts events, and a version_id_col counts flushes: leave"
            " that out, because the row is locked"
        )
    return mapper


def _has_rows(selectable: sa.FromClause) -> bool:
    """Whether it is a table, or an inner join of tables."""
    if isinstance(selectable, sa.Join):
        is_outer = selectable.isouter or selectable.full
        return not is_outer and _has_rows(selectable.left) and _has_rows(selectable.right)
    return isinstance(selectable, sa.Table)


def _base_of(mapper: Mapper[Any]) -> Mapper[Any]:
    """Return the mapper of the table that has a row for each instance."""
    while mapper.inherits is not None and not mapper.concrete:
        mapper = mapper.inherits
    return mapper


def create(entity: type[A], key: Key) -> A:
    """Make a new row with this primary key and the defaults that its columns have in Python.

    Raises `TypeError` for a value of another type than the database returns.
    """
    names, columns = primary_key(entity), sa.inspect(entity).columns
    row = entity(**dict(zip(names, key, strict=True)))
    for name, value in zip(names, canonical(entity, key), strict=True):
        kept = columns[name].type.python_type
        if value is not None and not isinstance(value, kept):
            raise TypeError(f"{entity.__name__}.{name} holds {kept.__name__}, not {value!r}")
    row.version = 0
    set_defaults(row)
    return row


def set_defaults(row: Aggregate) -> None:
    """Set the attributes of a new row that are unset to what SQLAlchemy would write for them."""
    values = instance_state(row).dict  # an assignment would call validators
    for name, default in _defaults(type(row)).items():
        if name not in values:
            values[name] = deepcopy(default)


@cache_by_class
def _defaults(entity: type[Any]) -> Mapping[str, Any]:
    """Return what SQLAlchemy would write for attributes that are unset, as far as it is fixed."""
    values: dict[str, Any] = {}
    for name, column in sa.inspect(entity).columns.items():
        if not isinstance(column, sa.Column):
            continue
        if isinstance(column.default, sa.ColumnDefault) and column.default.is_scalar:
            values[name] = column.default.arg
        elif not (
            column.default
            or column.server_default
            or column.primary_key
            or column.type.should_evaluate_none  # as of JSON, where None is null, not NULL
        ):
            values[name] = None
    return values
