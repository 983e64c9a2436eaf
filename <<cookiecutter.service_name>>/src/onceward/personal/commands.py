"""The commands `service personal …`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from onceward import Service
from onceward.apply.encryption import Rows
from onceward.cli.dead_events import DeadEvents
from onceward.cli.dead_letters import DeadLetters
from onceward.cli.errors import Refused
from onceward.cli.output import format_time, print_json, table, write
from onceward.cli.signing import Signed
from onceward.cli.terminal import Invocation, Limit, Yes, operation
from onceward.errors import StoreUnavailable
from onceward.operators import audit
from onceward.servers.revisions import check_database
from onceward.service import Misconfigured

from .encryption import PersonalData, personal_types
from .erasing import Forgotten, NoSubject, forget_now, forgotten
from .marks import Subject


def group(personal: PersonalData) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="Personal data, encrypted by a key per subject.", no_args_is_help=True)

    @operation(app, example="service personal forget 17 --yes", signed=Signed)
    async def forget(
        invocation: Invocation,
        signed: Signed,
        subject: Annotated[str, typer.Argument(help="id as in events")],
        kind: Annotated[
            str | None, typer.Option(help="of ids that need one", show_default="none")
        ] = None,
        by: Annotated[str | None, typer.Option(help="as --operator", hidden=True)] = None,
        wait: Annotated[
            float, typer.Option(min=0, help="seconds to wait for running transactions")
        ] = 60.0,
        yes: Yes = False,
    ) -> None:
        """Delete the key of a subject. It can't be undone; the output names what is not erased."""
        if not subject.strip():
            raise Refused("the subject is empty: name the id that its events have")
        name = Subject.of(subject, kind or "").name
        if not yes:
            invocation.confirm(f"Make everything stored of {name!r} unreadable, for ever?")
        if signed.operator is None:
            signed = Signed(signed.because, by or None)
        change = signed.to("forget")
        async with invocation.connected() as connection:
            try:
                done = await forget_now(
                    connection, subject, by=change.who, why=change.why, wait=wait, kind=kind
                )
            except NoSubject as error:
                raise Refused(str(error)) from None
        left = list(_not_erased(invocation.service, done))
        if invocation.as_json:
            print_json({"subject": subject, "kind": kind} | asdict(done) | {"not_erased": left})
            return
        write(f"{done.keys} keys of {name!r} are deleted.")
        for line in (*_found(done), "", "Not erased by this:", *(f"  - {one}" for one in left)):
            write(line)

    @operation(app, "forgotten", example="service personal forgotten --limit 10")
    async def list_forgotten(invocation: Invocation, limit: Limit = 50) -> None:
        """List the subjects that were forgotten, the latest first."""
        async with invocation.connected(check_database) as connection:
            found = await forgotten(connection, limit)
        rows = (
            [
                format_time(row["forgotten_at"]),
                row["subject"],
                row["kind"] or "",
                str(row["keys"]),
                row["forgotten_by"],
            ]
            for row in found
        )
        lines = table(("forgotten", "subject", "kind", "keys", "by"), rows, right=("keys",))
        invocation.answer(*map(dict, found), lines=lines)

    @operation(app, example="service personal rewrap", by=Signed)
    async def rewrap(invocation: Invocation, by: Signed) -> None:
        """Encrypt all keys by the first master key, so that the others can be taken out."""
        change = by.to("rewrap")
        async with invocation.connected() as connection:
            await audit.note(connection, change, "keys of personal data")
            with _in_words():
                count = await personal.keys.rewrap(connection)
        if invocation.as_json:
            print_json({"rewrapped": count})
        else:
            write(f"{count:,} keys were encrypted anew; all are by the first master key now.")

    @operation(app, example="service personal show 7d0f2c5e")
    async def show(
        invocation: Invocation,
        id: Annotated[str, typer.Argument(help="of a dead letter")],
        event: Annotated[bool, typer.Option("--event", help="of a dead event")] = False,
    ) -> None:
        """Write the plain payload of a dead letter or dead event to the output."""
        kind: type[DeadLetters | DeadEvents] = DeadEvents if event else DeadLetters
        async with invocation.connected(check_database) as connection:
            store = kind(connection, invocation.service, invocation.settings)
            (number,) = await store.keys_of([id])
            statement = f"SELECT payload FROM {kind.source} WHERE row_key = $1"
            rows: Rows = await connection.fetch(statement, number)
            if not rows:
                raise Refused(f"there is no {kind.name} {id}: see `service {kind.command} list`")
            with _in_words():
                (row,) = await personal.decrypt(connection, rows, "payload")
        if erased := row.get("erased"):
            raise Refused(f"{id} can't be read: {erased}")
        data = row["payload"] or b""
        write(data.decode(errors="backslashreplace") if sys.stdout.isatty() else data)

    return app


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except (Misconfigured, StoreUnavailable) as error:
        raise Refused(str(error)) from None


def _found(done: Forgotten) -> Iterator[str]:
    for number, what in (
        (done.dead_letters, "dead letters can't be read any more: discard them, by `service dead"),
        (
            done.dead_events,
            "dead events can't be read any more: discard them, by `service dead events",
        ),
    ):
        if number:
            yield f"{number:,} {what} discard --reason 'subject forgotten' --because …`"
    if done.waiting:
        yield (
            f"{done.waiting:,} messages wait in the backlog: they are handled with null in place of"
            " what is forgotten, or become dead letters"
        )
    if done.scheduled:
        yield (
            f"{done.scheduled:,} events are scheduled: they are published with null in the place of"
            " what is forgotten, or become dead events"
        )
    if not done.are_all_done:
        yield "Transactions that ran before are still running: run this again when they have ended."


def _not_erased(service: Service, done: Forgotten) -> Iterator[str]:
    """Yield what forgetting a subject leaves where it is."""
    topics = {one.__event_topic__ for one in personal_types() if one.__event_topic__}
    topics |= {one.topic for one in service.handlers if one.event in personal_types()}
    named = ", ".join(sorted(topics & service.topics)) or "none is declared"
    yield f"records in Kafka, which are plain until the topic's retention ends: {named}"
    yield "the service's own tables, which its handlers write"
    yield "backups from before this, which have the key: they need the master key to be read"
    yield "what other services have consumed, and logs and traces of handlers that name values"
    yield "hashes of payloads in the inbox, until its generations are dropped"
    if service.claims is not None:
        yield "large payloads in the object store, until PIPELINE_CLAIM_AGE is over"
    if done.of_the_service:
        yield (
            f"{done.of_the_service:,} rows of the backlog whose subject is not known, encrypted by"
            " the service's key: look at them by `service personal show`, and discard them"
        )
