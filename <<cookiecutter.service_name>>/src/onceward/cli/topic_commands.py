"""The commands `service topics …` and `service replay`."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.errors import for_code

from onceward.operators import offsets
from onceward.servers import clients, topics

from . import doctor, moves
from .dead_commands import span
from .errors import Refused
from .moves import Move, Place, Replay
from .output import Content, content_of, print_json, write
from .signing import Signed
from .terminal import DryRun, Invocation, naming_servers, operation

_REPLICAS = 3
"""Replicas with as many brokers: acknowledged records survive the loss of one."""
_TOPIC_EXISTS = 36
"""Kafka's error code TOPIC_ALREADY_EXISTS."""
_POLL_MS = 500
_MOST_DIGITS = 19
"""Digits of the largest offset. Python refuses to read a number of thousands of digits."""

app = typer.Typer(help="Kafka topics of the service.", no_args_is_help=True)
replay_app = typer.Typer()


def place(text: str) -> Place:
    """Return the place in a topic that a text names. Raises `typer.BadParameter`."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isdecimal() and len(text) <= _MOST_DIGITS:
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not earliest, latest, an offset, or a time such as 2026-11-01T08:00+00:00"
        ) from None
    if time.tzinfo is None:
        raise typer.BadParameter(f"{text!r} has no zone: write {text}+00:00 for UTC")
    return time


_METAVAR = "earliest|latest|OFFSET|TIME"
_Topic = Annotated[str, typer.Argument(help="a topic that the service reads")]
_Partition = Annotated[int | None, typer.Option(min=0, help="only this one")]


@operation(app, example="service topics create --partitions 16")
async def create(
    invocation: Invocation,
    partitions: Annotated[int, typer.Option(min=1, help="partitions of a new topic")] = 8,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="of each; default: 3, or the number of brokers")
    ] = None,
) -> None:
    """Create missing topics; existing ones are not changed.

    In production give the number of partitions: changing it later breaks the order of keys.
    """
    settings = invocation.settings
    names = doctor.used_topics(invocation.service, settings)
    with naming_servers(settings):
        async with clients.admin_client(settings) as admin:
            if replicas is None:
                replicas = min(_REPLICAS, len((await admin.describe_cluster())["brokers"]))
            new = [NewTopic(name, partitions, replicas) for name in sorted(names)]
            answer = await admin.create_topics(new)
    done: dict[str, list[str]] = {"created": [], "existed": []}
    made = f"created with {partitions} partitions, replicas: {replicas}"
    # aiokafka returns the error codes of topics instead of raising.
    for name, code, *_ in answer.topic_errors:
        if code not in (0, _TOPIC_EXISTS):
            raise for_code(code)(f"topic {name} was not created")
        done["existed" if code else "created"].append(name)
        invocation.say(f"{name}: {'exists' if code else made}")
    invocation.answer(done | {"partitions": partitions, "replicas": replicas})


@operation(app, example="service topics seek scans --to earliest --dry-run", by=Signed)
async def seek(
    invocation: Invocation,
    by: Signed,
    topic: _Topic,
    to: Annotated[str, typer.Option(metavar=_METAVAR, help="new position")],
    partition: _Partition = None,
    dry_run: DryRun = False,
) -> None:
    """Change positions in a topic: what took effect before is still skipped."""
    to_place, change = place(to), by.to("seek")
    async with invocation.connected() as connection:
        found = await moves.plan_moves(connection, invocation, topic, partition, to_place)
        for one in found:
            if not dry_run:
                await offsets.seek(connection, one.slot, one.new, change)
            invocation.say(moved(one, "would go" if dry_run else "goes"))
    invocation.answer(*found)


@operation(app, example="service topics record scans --last 1h")
async def record(
    invocation: Invocation,
    topic: _Topic,
    last: Annotated[
        timedelta | None,
        typer.Option(parser=span, metavar="90s|15m|2h|7d", help="how far to look back; 1h"),
    ] = None,
    personal: Annotated[
        bool, typer.Option("--personal", help="show fields that are marked as personal or secret")
    ] = False,
) -> None:
    """Write the records of a topic as JSON, a line each, for `make prove` and the test kit.

    Secrets are hidden, and the fields of events that are marked as personal or secret.
    """
    settings, since = invocation.settings, datetime.now(UTC) - (last or timedelta(hours=1))
    with naming_servers(settings):
        described = (await topics.describe(settings, [topic])).get(topic)
        if described is None:
            raise Refused(f"there is no topic {topic}")
        first = await moves.offsets_since(settings, topic, described.stable, since)
        async with clients.offsets_client(settings) as client:
            for number, beyond in sorted(described.stable.items()):
                place = TopicPartition(topic, number)
                client.assign([place])
                client.seek(place, first[number])
                while await client.position(place) < beyond:
                    found = await client.getmany(place, timeout_ms=_POLL_MS)
                    for one in found.get(place, ()):
                        if one.offset < beyond:
                            print_json(_line(one, shows_fields=personal))


def _line(one: "ConsumerRecord[bytes, bytes]", *, shows_fields: bool) -> dict[str, object]:
    def content(data: bytes | None) -> Content:
        return content_of(data, shows_fields=shows_fields)

    return {
        "topic": one.topic,
        "partition": one.partition,
        "offset": one.offset,
        "timestamp": one.timestamp,
        "key": content(one.key),
        "headers": [(name, content(value)) for name, value in one.headers],
        "value": content(one.value),
    }


@operation(replay_app, example="service replay scans --from 2026-11-01T08:00+00:00", by=Signed)
async def replay(
    invocation: Invocation,
    by: Signed,
    topic: _Topic,
    since: Annotated[str, typer.Option("--from", metavar=_METAVAR, help="where to begin")],
    partition: _Partition = None,
    too_old: Annotated[
        bool, typer.Option("--too-old", help="allow older than the inbox: they become dead letters")
    ] = False,
    wait: Annotated[bool, typer.Option(help="report progress until it is done")] = True,
) -> None:
    """Read a topic again: what took effect is skipped, the rest is handled."""
    start, change, became = place(since), by.to("replay"), None
    async with invocation.connected() as connection:
        planned = await moves.plan_replay(connection, invocation, topic, partition, start)
        if planned.forgotten and not too_old:
            raise Refused(forgotten(planned))
        for one in planned.moves:
            await offsets.rewind(connection, one.slot, one.new, change)
            invocation.say(moved(one, "goes"))
        if wait:
            before = -1
            async for done in moves.follow(connection, planned):
                hint = ": does the service run?" if done == before else ""
                invocation.say(f"{done:,} of {planned.records:,} offsets are read again{hint}")
                before = done
            became = dict(await moves.outcome(connection, planned))
    if invocation.as_json:
        print_json({"moves": planned.moves, "became": became})
    elif became:
        waiting = f", {became['waiting']:,} wait in the backlog" if became["waiting"] else ""
        write(
            f"{became['applied']:,} messages took effect, {became['known']:,} had done so"
            f" before{waiting}; others were dead letters, or have no handler"
        )
        if became["buried"]:
            write(
                f"{became['buried']:,} messages were too old, and are dead letters now:"
                ' `service dead list --reason "too old"`'
            )


def forgotten(planned: Replay) -> str:
    """Return why a replay is refused: what it reads may be forgotten."""
    return (
        f"{planned.forgotten:,} of {planned.records:,} offsets are from before {planned.since}."
        " The inbox no longer remembers what took effect then, or soon will not:"
        " they would become dead letters, as too old. Begin with"
        f" --from {planned.since:%Y-%m-%dT%H:%M:%SZ}, or add --too-old"
    )


def moved(one: Move, verb: str) -> str:
    """Return from where to where a partition goes, and what is skipped."""
    old = "the beginning" if one.old is None else one.old
    passed = one.new - max(one.first, one.old or one.first)
    lost = f"; skips {passed} offsets, which this service never reads" if passed > 0 else ""
    return (
        f"{one.slot.topic}/{one.slot.partition} {verb} from {old} to {one.new}"
        f" (the brokers have {one.first} to {one.end}){lost}"
    )
