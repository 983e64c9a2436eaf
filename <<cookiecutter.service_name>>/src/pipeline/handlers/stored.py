"""Whether a row in memory is what the database would return for it."""

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import InstanceState, Mapper

from .aggregate import primary_key

_NO_OFFSET = timedelta(0)

_EXACT: dict[type[sa.types.TypeEngine[Any]], type] = {
    sa.SmallInteger: int,
    sa.Integer: int,
    sa.BigInteger: int,
    sa.String: str,
    sa.Text: str,
    sa.Unicode: str,
    sa.UnicodeText: str,
    sa.Boolean: bool,
    sa.Double: float,
    sa.Date: date,
    sa.Uuid: UUID,
    sa.LargeBinary: bytes,
}
"""Column types that return a written value unchanged if it has this Python type."""


_IMMUTABLE = (sa.types.Numeric, sa.types.DateTime, sa.Enum, sa.String)


class _Kind(NamedTuple):
    """Properties of the rows of a class."""

    size: int
    """Entries in the `__dict__` of a row that is loaded: its columns and SQLAlchemy's state."""
    checks: dict[str, Callable[[Any], bool]]
    """By column: whether the database would return the value unchanged."""
    keys: frozenset[str]
    """Columns of the primary key."""
    may_mutate: bool
    """Whether a value can change in place or by a relationship, which its row does not show."""
    is_computed: bool
    """Whether the database computes columns when the row is written."""


def is_as_stored(row: Any) -> bool:
    """Whether a transaction that reads the row after its flush would see what is in memory."""
    state: InstanceState[Any] = sa.inspect(row, raiseerr=True)
    kind = _kind_of(row.__class__)
    if kind.may_mutate or len(state.dict) != kind.size:
        return False
    if not state.modified and state.key is not None:
        return True
    if kind.is_computed:
        return False
    values, checks = state.dict, kind.checks
    changed = state.committed_state if state.key is not None else checks
    if state.key is not None and not kind.keys.isdisjoint(changed):
        return False
    for name in changed:
        check = checks.get(name)
        if check is None or not (values[name] is None or check(values[name])):
            return False
    return True


@cache
def _kind_of(entity: type[Any]) -> _Kind:
    mapper: Mapper[Any] = sa.inspect(entity)
    attributes: dict[str, object] = dict(mapper.columns.items())
    columns = {name: one for name, one in attributes.items() if isinstance(one, sa.Column)}
    checks = {
        name: check
        for name, column in columns.items()
        if (check := _check_of(column.type)) is not None
    }
    may_mutate = len(columns) < len(attributes) or any(
        name not in checks and not isinstance(column.type, _IMMUTABLE)
        for name, column in columns.items()
    )
    is_related = any(
        mapper in (one, relationship.mapper)
        for one in mapper.registry.mappers
        for relationship in one.relationships
    )
    is_computed = any(
        column.computed is not None or column.onupdate is not None or column.server_onupdate
        for column in columns.values()
    )
    keys = frozenset(primary_key(entity))
    return _Kind(len(columns) + 1, checks, keys, may_mutate or is_related, is_computed)


def _check_of(kind: sa.types.TypeEngine[Any]) -> Callable[[Any], bool] | None:
    exact = _EXACT.get(type(kind))
    if exact is not None and getattr(kind, "collation", None) is None:
        return lambda value: type(value) is exact
    if type(kind) is sa.DateTime and kind.timezone:
        return lambda value: type(value) is datetime and value.utcoffset() == _NO_OFFSET
    if type(kind) is sa.Numeric and kind.scale is not None and kind.asdecimal:
        scale = -kind.scale
        return lambda value: type(value) is Decimal and value.as_tuple().exponent == scale
    if type(kind) is sa.Enum and kind.enum_class is not None:
        member = kind.enum_class
        return lambda value: isinstance(value, member)
    return None
