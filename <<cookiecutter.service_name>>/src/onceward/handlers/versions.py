"""What rows in memory were, between messages: to undo a message, or to write each version."""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple, cast

import sqlalchemy as sa
from sqlalchemy.orm import InstanceState, Session
from sqlalchemy.orm.attributes import flag_modified

from .columns import can_hide_changes, columns_of, primary_key

_PREFIX = "pipeline_version_of_"
"""Of parameters, whose names must be no columns'."""


class Snapshot(NamedTuple):
    """A row of a session as it was at some time."""

    values: dict[str, Any]
    unwritten: dict[str, Any]
    """Its attributes that were changed and not written yet, with their values in the database."""
    is_modified: bool

    def has_changed(self, state: InstanceState[Any]) -> bool:
        """Whether the row differs, as far as that is seen."""
        return can_hide_changes(state.class_) or self.values != state.dict

    def restore(self, state: InstanceState[Any], session: Session) -> None:
        """Make the row what it was."""
        for present, before in (
            (state.dict, self.values),
            (state.committed_state, self.unwritten),
        ):
            present.clear()
            present.update(before)
        if not self.is_modified:
            state.modified = False
            session.identity_map._modified.discard(state)


class Versions:
    """Versions of rows that later messages have changed, which are not written yet."""

    def __init__(self) -> None:
        self._kept: dict[InstanceState[Any], list[dict[str, Any]]] = {}
        """Values by attribute, version by version."""
        self._unjudged: set[InstanceState[Any]] = set()
        """New rows that the database accepts in each version."""

    def keep(self, state: InstanceState[Any], *, is_judged: bool) -> None:
        """Keep what a row is now, if it is not written yet, and is new or judged."""
        if state.key is None or (is_judged and state.committed_state):
            values = {name: state.dict[name] for name in columns_of(state.class_)}
            versions = self._kept.setdefault(state, [])
            if not versions or versions[-1] != values:
                versions.append(values)
            if not is_judged:
                self._unjudged.add(state)

    def flush(self, session: Session) -> None:
        """Write the session's rows: it writes the first and the last version of each."""
        if not self._kept:
            Session.flush(session)
            return
        kept = {
            state: versions
            for state, versions in self._kept.items()
            if state not in self._unjudged or _becomes_null(state, versions[0])
        }
        self._kept, self._unjudged = {}, set()
        last = {state: state.dict.copy() for state in kept}
        for state, versions in kept.items():
            state.dict.update(versions[0])
        Session.flush(session)
        later: dict[type[Any], list[dict[str, Any]]] = {}
        changed: dict[type[Any], set[str]] = {}
        for state, (first, *others) in kept.items():
            for values in others:
                later.setdefault(state.class_, []).append(values)
                names = changed.setdefault(state.class_, {*primary_key(state.class_)})
                names |= {name for name in values if values[name] != first[name]}
                state.dict.update(values)
        for entity, versions in later.items():
            for of_table, update in _updates(entity, changed[entity]):
                rows = [{_PREFIX + name: values[name] for name in of_table} for values in versions]
                session.connection().execute(update, rows)
        for state, values in last.items():
            for name, written in kept[state][-1].items():
                if values.get(name) is not written:
                    state.dict[name] = values.get(name)
                    flag_modified(state.obj(), name)
                    state.committed_state[name] = written  # a key is found by it
        Session.flush(session)


def _becomes_null(state: InstanceState[Any], first: dict[str, Any]) -> bool:
    """Whether a value has become None, for which an INSERT would write the default."""
    values = state.dict
    return any(values.get(name) is None for name, value in first.items() if value is not None)


def _updates(entity: type[Any], names: Set[str]) -> Iterator[tuple[Set[str], sa.Update]]:
    """Yield the statements that write attributes of a row, of which some are its key: one for each
    of its tables that has others of them, with their names."""
    mapper, keys = sa.inspect(entity), primary_key(entity)
    for table in cast(Sequence[sa.Table], mapper.tables):
        columns = {
            name: column
            for name in sorted(names)
            for column in mapper.column_attrs[name].columns
            if column.table is table
        }
        new: dict[str, sa.BindParameter[Any]]
        new = {name: sa.bindparam(_PREFIX + name) for name in columns}
        changed = {columns[name]: new[name] for name in columns if name not in keys}
        if changed:
            same = (columns[name] == new[name] for name in keys)
            yield columns.keys(), sa.update(table).where(*same).values(changed)
