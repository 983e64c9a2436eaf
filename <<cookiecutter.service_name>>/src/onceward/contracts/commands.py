"""The commands `service schema …`, which need no server and no settings."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onceward import Service
from onceward.cli.output import print_json, write
from onceward.cli.terminal import Json, in_a_sentence

from .asyncapi import described
from .check import Mode, read, verdicts
from .export import exported, written


class Format(StrEnum):
    """The format of an export."""

    JSON_SCHEMA = "json-schema"
    ASYNCAPI = "asyncapi"


def group(service: Service) -> typer.Typer:
    """Return the commands for a service."""
    app = typer.Typer(help="Schemas of the events.", no_args_is_help=True)

    @app.command(epilog="For example: service schema export --format asyncapi")
    def export(
        format: Annotated[Format, typer.Option(help="format to write")] = Format.JSON_SCHEMA,
        output: Annotated[
            Path | None, typer.Option(help="file to write; default: standard output")
        ] = None,
    ) -> None:
        """Write the schemas of all events consumed and published, or an AsyncAPI document."""
        with in_a_sentence():
            text = written((exported if format is Format.JSON_SCHEMA else described)(service))
            if output is None:
                write(text, end="")
            else:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(text, "utf-8")

    @app.command(epilog="For example: service schema check contracts/events.json")
    def check(
        old: Annotated[
            list[Path],
            typer.Argument(
                exists=True, help="earlier exports, the oldest first, or folders of them"
            ),
        ],
        mode: Annotated[
            Mode,
            typer.Option(
                case_sensitive=False,
                help="BACKWARD: new readers, old events; FORWARD: old readers, new events; FULL:"
                " both; TRANSITIVE: with all given exports",
            ),
        ] = Mode.FULL,
        as_json: Json = False,
    ) -> None:
        """Compare the schemas with an earlier export; exit code 1 if events would be rejected."""
        with in_a_sentence():
            _check(service, old, mode, as_json=as_json)

    return app


def _check(service: Service, old: list[Path], mode: Mode, *, as_json: bool) -> None:
    new, is_broken, count = exported(service), False, 0
    exports = read(old, mode)
    for file, export in exports:
        for one in verdicts(export, new, mode):
            is_broken = is_broken or one.is_break
            count += 1
            if as_json:
                print_json({"file": str(file), **asdict(one)})
            else:
                of_file = f"{file}: " if len(exports) > 1 else ""
                text = f"{of_file}{one.topic}, {one.type}: {one.text}"
                write(text, err=not one.is_break)
    if is_broken:
        raise typer.Exit(1)
    if not count and not as_json:
        write(f"The events are compatible ({mode}).")
