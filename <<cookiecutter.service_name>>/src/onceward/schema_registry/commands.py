"""The commands `service registry …`. They need the registry and no other server."""

from collections.abc import Iterator

import typer
from confluent_kafka.schema_registry import Schema

from onceward import Event, Service, Tombstone
from onceward.cli.output import one_line, print_json, write
from onceward.cli.terminal import Json, run_to_end
from onceward.events.event import declared_events

from .client import Registry, Session, Unknown
from .codec import Confluent


def group(service: Service) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="Schemas in the schema registry.", no_args_is_help=True)
    app.callback()(lambda: None)  # a group, although it has one command

    @app.command(epilog="For example: service registry check")
    def check(as_json: Json = False) -> None:
        """Compare the schemas of the code with the registry's; exit code 1 if one is rejected."""
        run_to_end(_check(service, as_json=as_json))

    return app


async def _check(service: Service, *, as_json: bool) -> None:
    breaks: list[bool] = []
    async with Registry.of_environment().session() as session:
        for topic, event, codec in _events(service):
            subject, type = codec.subject(topic, event)[0], event.__event_type__
            is_break, text = await _compared(session, subject, codec.schemas.get(event))
            breaks.append(is_break)
            if as_json:
                found = {"topic": topic, "type": type, "subject": subject}
                print_json({**found, "is_break": is_break, "text": text})
            else:
                write(one_line(f"{subject}, {type}: {text}"))
    if any(breaks):
        raise typer.Exit(1)
    if not breaks:
        write("No topic with the codec Confluent has events.", err=as_json)


def _events(service: Service) -> Iterator[tuple[str, type[Event], Confluent]]:
    """Yield the events that are taken or published in topics whose codec is `Confluent`."""
    for topic, codec in service.handlers.codecs.items():
        if isinstance(codec, Confluent):
            events = {one.event for one in service.handlers.takers if one.topic == topic}
            events |= {one for one in declared_events() if one.__event_topic__ == topic}
            for event in sorted(events - {Tombstone}, key=lambda one: one.__event_type__):
                yield topic, event, codec


async def _compared(session: Session, subject: str, schema: Schema | None) -> tuple[bool, str]:
    """Return whether the registry rejects the schema, and a sentence."""
    if schema is None:
        return False, (
            "not compared: the code has no schema for it, and the latest of the subject is used;"
            " whether the event class fits that one is not checked"
        )
    try:
        version = (await session.lookup(subject, schema)).version
        return False, f"the schema is registered, as version {version}"
    except Unknown as error:
        if str(error):
            return True, str(error)
    try:
        latest = (await session.latest(subject)).version
        level, reasons = await session.compared(subject, schema)
    except Unknown as error:
        return bool(str(error)), str(error) or "the schema would be the subject's first version"
    details = f"(level {level}, latest version {latest})"
    if reasons is not None:
        return True, f"the schema is incompatible {details}: {reasons}"
    warning = "; with NONE nothing but a global level is applied" * (level == "NONE")
    return False, f"the schema is compatible {details}{warning}"
