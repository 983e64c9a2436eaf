"""The commands `service status` and `service doctor`: how it is, and what is wrong with it."""

import asyncio
from collections.abc import Iterator
from typing import Annotated

import asyncpg
import typer

from pipeline.errors import summarize_error
from pipeline.service import Service
from pipeline.settings import Settings

from . import doctor, status
from .tables import tell_table
from .terminal import Away, Json, connected, read_settings, run_to_end, tell_program

_CLEAR = "\x1b[2J\x1b[H"


def add_to(app: typer.Typer, service: Service) -> None:
    """Add the commands for a service."""

    @app.command("status", epilog="For example: service status --watch")
    def show(
        watch: Annotated[bool, typer.Option("--watch", help="again and again, to Ctrl+C")] = False,
        every: Annotated[float, typer.Option(min=0.5, help="seconds between two looks")] = 2.0,
        as_json: Json = False,
    ) -> None:
        """Show on one screen how far everything is. Counts end at 10,000+.

        Each process knows its own breakers: ask /health/ready for those that are open.
        """
        again_after = every if watch else None
        run_to_end(_show(service, read_settings(service), again_after, as_json=as_json))

    @app.command("doctor", epilog="For example: service doctor --strict --json")
    def examine(
        strict: Annotated[bool, typer.Option("--strict", help="warnings fail, too")] = False,
        as_json: Json = False,
    ) -> None:
        """Look for what is wrong, and say what to do about it; changes nothing.

        The exit code is 1 when something is wrong.
        """
        run_to_end(_examine(service, read_settings(service), is_strict=strict, as_json=as_json))


async def _show(
    service: Service, settings: Settings, again_after: float | None, *, as_json: bool
) -> None:
    while True:
        try:
            async with connected(service, settings) as connection:
                while True:
                    found = await status.look(connection, service, settings)
                    if as_json:
                        tell_program(found)
                    else:
                        typer.echo((_CLEAR if again_after else "") + "\n".join(status.told(found)))
                    if again_after is None:
                        return
                    await asyncio.sleep(again_after)
        except Away as error:  # who watches an outage wants to see its end
            if again_after is None:
                raise
            typer.echo(error, err=True)
            await asyncio.sleep(again_after)


async def _examine(service: Service, settings: Settings, *, is_strict: bool, as_json: bool) -> None:
    try:
        async with connected(service, settings) as connection:
            found = await _findings(connection, service, settings)
    except Away as error:
        advice = "start the server, or correct PIPELINE_DATABASE_URL; then the rest is checked"
        away = doctor.Finding("postgresql", "wrong", summarize_error(error), advice)
        found = [away, *await _findings(None, service, settings)]
    if as_json:
        tell_program(*found)
    else:
        tell_table(("level", "check", "found"), (row for one in found for row in _rows(one)))
    levels = {one.level for one in found}
    if "wrong" in levels or (is_strict and "warning" in levels):
        raise typer.Exit(1)


def _rows(finding: doctor.Finding) -> Iterator[tuple[str, str, str]]:
    yield finding.level, finding.check, finding.found
    if finding.advice:
        yield "", "", f"-> {finding.advice}"


async def _findings(
    connection: asyncpg.Connection | None, service: Service, settings: Settings
) -> list[doctor.Finding]:
    return [one async for one in doctor.examine(connection, service, settings)]
