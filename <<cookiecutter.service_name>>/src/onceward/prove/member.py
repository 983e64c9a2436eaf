"""A process of the service under faults.

`python -m onceward.prove.member FILE NAME NOTES COMMAND…` runs a command of the service that the
file proves, by another name. It appends to the notes, as lines of JSON: its sessions in PostgreSQL,
calls of handlers that have returned, and calls that would have gone outside.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.pool import Pool

from onceward.cli.commands import command_line

from .proof import Note, load


def noting(path: Path) -> Note:
    """Return the function that appends a line, by one write, as other processes append lines."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(*words: object) -> None:
        os.write(file, json.dumps(words).encode() + b"\n")

    return note


def main(file: str, name: str, notes: str, *command: str) -> None:
    """Run the command."""
    note = noting(Path(notes))

    @event.listens_for(Pool, "connect")
    def connected(connection: Any, _: object) -> None:
        note("session", os.getpid(), connection.driver_connection.get_server_pid())

    service = load(Path(file)).instrumented(name, note)
    sys.argv = ["service", *command]
    command_line(service).run_process()


if __name__ == "__main__":
    main(*sys.argv[1:])
