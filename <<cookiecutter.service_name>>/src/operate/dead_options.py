"""The options of `service dead …` that several commands share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Annotated

import asyncpg
import typer

from .dead import Selection, Store

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def _span(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 15m, 2h or 7d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


_Age = Annotated[timedelta | None, typer.Option(parser=_span, metavar="90s|15m|2h|7d")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="as `list` shows them")]


async def ago(connection: asyncpg.Connection, time: timedelta) -> datetime:
    """Return the time so long ago, by the database's clock."""
    moment: datetime = await connection.fetchval("SELECT clock_timestamp() - $1::interval", time)
    return moment


@dataclass(frozen=True)
class Filters:
    """Options that choose entries."""

    reason: Annotated[list[str] | None, typer.Option(help="may be repeated")] = None
    event_id: Annotated[str | None, typer.Option(help="the event's own id, as in the log")] = None
    type: Annotated[str | None, typer.Option(help="type of the event")] = None
    topic: Annotated[str | None, typer.Option(help="topic of the record or event")] = None
    key: Annotated[str | None, typer.Option(help="the key in Kafka")] = None
    older_than: _Age = None
    newer_than: _Age = None

    @property
    def are_given(self) -> bool:
        """Whether any option is set."""
        return any(getattr(self, one.name) not in (None, []) for one in fields(self))

    async def select(
        self, store: Store, connection: asyncpg.Connection, ids: Sequence[str] | None = None
    ) -> Selection:
        """Return the entries that the options and ids choose at this moment."""
        for reason in self.reason or ():
            if reason not in store.reasons:
                known = ", ".join(store.reasons)
                raise typer.BadParameter(f"--reason {reason!r} is none of: {known}")
        consumer = getattr(self, "consumer", None)  # events have none
        return Selection(
            keys=await store.keys_of(ids) if ids else None,
            reasons=self.reason or None,
            consumers=None if consumer is None else [consumer],
            event_id=self.event_id,
            type=self.type,
            topic=self.topic,
            record_key=None if self.key is None else self.key.encode(),
            since=None if self.newer_than is None else await ago(connection, self.newer_than),
            # Excludes what dies from now on.
            until=await ago(connection, self.older_than or timedelta(0)),
        )


@dataclass(frozen=True)
class LetterFilters(Filters):
    """Options that choose dead letters."""

    consumer: Annotated[
        str | None, typer.Option(help="name; '' for records that no handler has seen")
    ] = None


@dataclass(frozen=True)
class Confirmation:
    """Options of commands that change entries."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="only count")] = False
    everything: Annotated[bool, typer.Option("--all", help="without ids and filters")] = False
    yes: Annotated[bool, typer.Option("--yes", help="don't ask")] = False

    def check(self, *, are_chosen: bool) -> None:
        """Demand `--all` with `--yes` where no id or filter chooses.

        Ids may come from a shell's variable that was empty.
        """
        if self.everything and are_chosen:
            raise typer.BadParameter("--all excludes ids and filters")
        if self.yes and not (are_chosen or self.everything or self.dry_run):
            raise typer.BadParameter(
                "--yes without an id or a filter would mean everything: say --all if you mean that"
            )
