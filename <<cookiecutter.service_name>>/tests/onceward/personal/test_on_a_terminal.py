"""Plain payloads on a terminal, and in a file."""

import json
from dataclasses import replace

import pytest

from .clinic import rejects, visit
from .conftest import KEYS, NewClinic
from tests.servers.processes import environment, starting
from tests.servers.terminals import terminals

pytestmark = pytest.mark.integration

APP = f"{__package__}.app"
HOSTILE = "\x9b2J\u202egnp.exe"
"""What JSON may contain as it is: clears the screen, and shows the rest from right to left."""


async def test_a_hostile_payload_is_shown_escaped_and_written_to_files_unchanged(
    new_clinic: NewClinic, database_url: str, kafka: str
) -> None:
    clinic, applier = await new_clinic()
    clinic.does = {1: rejects}
    value = json.dumps({"patient": "p1", "email": HOSTILE, "number": 1}, ensure_ascii=False)
    await applier.apply(replace(visit(1), value=value.encode()))
    (row,) = await applier.backlog()
    show = "personal", "show", row["key"].hex()[:16]
    settings = {
        "database_url": database_url,
        "kafka_bootstrap_servers": kafka,
        "personal_keys": KEYS[0],
    }
    with terminals(APP, environment({}, **settings)) as on_terminal:
        shown = on_terminal(*show)
        assert await shown.ended() == 0, shown.shown
        assert r"\u009b2J\u202egnp.exe" in shown.shown
        assert {letter for letter in shown.raw if not letter.isprintable()} <= {"\n"}
    async with starting(APP, dict, **settings) as start:
        written = await start(*show)
        assert await written.ended() == 0, written.output
        assert json.loads(written.output)["email"] == HOSTILE
