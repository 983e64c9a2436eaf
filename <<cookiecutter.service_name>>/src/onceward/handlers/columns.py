"""Columns: which values of Python the database returns as they are, or as which others."""

import math
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.base import DEFAULT_STATE_ATTR

from onceward.errors import UNSTORABLE

T = TypeVar("T")

_EXACT: dict[type[sa.types.TypeEngine[Any]], type] = {
    sa.SmallInteger: int,
    sa.Integer: int,
    sa.BigInteger: int,
    sa.String: str,
    sa.Text: str,
    sa.Unicode: str,
    sa.UnicodeText: str,
    sa.Boolean: bool,
    sa.Date: date,
    sa.DateTime: datetime,
    sa.Uuid: UUID,
    postgresql.UUID: UUID,
    sa.LargeBinary: bytes,
    postgresql.BYTEA: bytes,
}
"""Column types that return a written value unchanged if it has this Python type."""
_BITS: dict[type[Any], int] = {sa.SmallInteger: 15, sa.Integer: 31, sa.BigInteger: 63}
_IMMUTABLE = (sa.types.Numeric, sa.types.DateTime, sa.Enum, sa.String)
_NO_OFFSET = timedelta(0)
_ROUNDING = Context(prec=1_100, rounding=ROUND_HALF_UP)
"""Rounds as PostgreSQL does, whose declared precision is at most 1,000 digits."""


def cache_by_class(build: Callable[[type[Any]], T]) -> Callable[[type[Any]], T]:
    """Decorate a function of a class as `functools.cache` does, which mypy allows no classes."""
    return cast(Callable[[type[Any]], T], cache(build))


class Column(NamedTuple):
    """A column whose values are equal in Python exactly if they are equal in the database."""

    returned: Callable[[Any], Any] | None = None
    """Returns what the database returns for a value; None: the value itself."""
    is_unchanged: Callable[[Any], bool] | None = None
    """Whether the database accepts a value and returns it with all of its properties; None: that is
    unknown."""


def column_of(kind: sa.types.TypeEngine[Any]) -> Column | None:
    """Return the column of a type; None if equality is not the same in Python and PostgreSQL."""
    exact = _EXACT.get(type(kind))
    if isinstance(kind, sa.Enum) and (members := kind.enum_class) is not None:
        by_text = dict(zip(kind.enums, members, strict=True))
        return Column(
            lambda value: by_text.get(value, value) if isinstance(value, str) else value,
            lambda value: isinstance(value, members),
        )
    if isinstance(kind, postgresql.TIMESTAMP) and kind.precision not in (None, 6):
        return None  # the database rounds it
    if isinstance(kind, sa.DateTime) and kind.timezone:
        return Column(
            lambda value: value.astimezone(UTC) if isinstance(value, datetime) else value,
            # Types of the dialect can have a precision.
            exact and (lambda value: type(value) is datetime and value.utcoffset() == _NO_OFFSET),
        )
    if isinstance(kind, sa.DateTime):
        return Column(
            None, exact and (lambda value: type(value) is datetime and value.tzinfo is None)
        )
    if isinstance(kind, sa.Numeric) and kind.asdecimal and kind.scale is not None:
        scale = -kind.scale
        step, limit = Decimal(1).scaleb(scale), Decimal(1).scaleb((kind.precision or 0) + scale)
        return Column(
            lambda value: _rounded(value, step),
            lambda value: (
                type(value) is Decimal
                and value.as_tuple().exponent == scale
                and value.copy_abs() < limit
                and not (value == 0 and value.is_signed())
            ),
        )
    if isinstance(kind, sa.Uuid) and not kind.as_uuid:
        return Column(lambda value: str(UUID(value)))
    is_text = isinstance(kind, sa.String) and not isinstance(kind, sa.CHAR | postgresql.CITEXT)
    if exact is int:
        most = 2 ** _BITS[type(kind)]
        return Column(None, lambda value: type(value) is int and -most <= value < most)
    if exact is str and getattr(kind, "collation", None) is None:
        longest = getattr(kind, "length", None) or math.inf
        return Column(
            None,
            lambda value: (
                type(value) is str and len(value) <= longest and not UNSTORABLE.search(value)
            ),
        )
    if (exact or is_text) and getattr(kind, "collation", None) is None:
        return Column(None, exact and (lambda value: type(value) is exact))
    return None


def _rounded(value: Any, step: Decimal) -> Decimal:
    """Return a number as the database rounds it, which takes a float by its text and has no -0."""
    exact = Decimal(str(value) if isinstance(value, float) else value)
    return _ROUNDING.add(_ROUNDING.quantize(exact, step), 0)


def is_as_stored(row: Any) -> bool:
    """Whether a transaction that reads the row after its flush would see what is in memory."""
    checks = _checks(row.__class__)
    state = instance_state(row)  # sa.inspect() takes ten times as long
    values, is_new = state.dict, state.key is None
    if checks is None or values.keys() != checks.keys():  # some are unset, or no columns
        return False
    if not (is_new or state.committed_state.keys().isdisjoint(primary_key(row.__class__))):
        return False
    for name in checks if is_new else state.committed_state:
        check = checks[name]
        if check is None or not check(values[name]):
            return False
    return True


@cache_by_class
def _checks(entity: type[Any]) -> dict[str, Callable[[Any], bool] | None] | None:
    """Return, by attribute, whether the database would return the same for a written value, unless
    a constraint rejects it.

    None: that is unknown, as of all of them if the database computes a column. The result is None
    if a value can change in place or by a relationship, which its row does not show, or if a row
    is in several tables.
    """
    mapper: Mapper[Any] = sa.inspect(entity)
    attributes: dict[str, object] = dict(mapper.columns.items())
    columns = {name: one for name, one in attributes.items() if isinstance(one, sa.Column)}
    checks = {name: _check(column) for name, column in columns.items()}
    is_divided = len(mapper.tables) > 1 or len(set(columns.values())) < len(attributes)
    if can_hide_changes(entity) or is_divided:
        return None
    is_computed = any(
        column.computed is not None or column.onupdate is not None or column.server_onupdate
        for column in columns.values()
    )
    known = dict.fromkeys(columns) if is_computed else checks
    return {**known, DEFAULT_STATE_ATTR: lambda _: True}


def _check(column: sa.Column[Any]) -> Callable[[Any], bool] | None:
    found = column_of(column.type)
    if found is None:
        return None
    check = found.is_unchanged
    is_optional = column.nullable and column.default is None and column.server_default is None
    if check is None or not is_optional:
        return check
    return lambda value: value is None or check(value)


@cache_by_class
def can_hide_changes(entity: type[Any]) -> bool:
    """Whether a row can change, by a relationship or in place, without a new value of its own."""
    mapper: Mapper[Any] = sa.inspect(entity)
    is_related = any(
        mapper.isa(one) or mapper.isa(relationship.mapper)
        for one in mapper.registry.mappers
        for relationship in one.relationships
    )
    columns: Iterable[object] = mapper.columns
    types = [one.type for one in columns if isinstance(one, sa.Column)]
    return is_related or not all(column_of(one) or isinstance(one, _IMMUTABLE) for one in types)


@cache_by_class
def related(entity: type[Any]) -> Iterable[type[Any]]:
    """Return the classes to which relationships of the class lead."""
    return [one.mapper.class_ for one in sa.inspect(entity).relationships]


@cache_by_class
def columns_of(entity: type[Any]) -> tuple[str, ...]:
    """Return the attributes of its columns."""
    return tuple(sa.inspect(entity).columns.keys())


@cache_by_class  # needed for every message; SQLAlchemy takes 2 µs
def primary_key(entity: type[Any]) -> tuple[str, ...]:
    """Return the attributes of the primary key, in the order of its columns."""
    mapper = sa.inspect(entity)
    return tuple(mapper.get_property_by_column(column).key for column in mapper.primary_key)
