"""A service that archives, as a program: `python -m tests.onceward.archive.app`."""

import os
import signal
from collections.abc import Mapping

from sqlalchemy import MetaData

from onceward import Handlers, Service
from onceward.archive import Archive, days
from onceward.archive.commands import group
from onceward.cli.commands import command_line
from onceward.object_store import Store

NAME = "orders"

archive = Archive(NAME)
service = Service(NAME, handlers=Handlers(), metadata=MetaData(), archive=archive)


def make_mortal(after: int) -> None:
    """Let the process be killed when it has written so many objects."""
    put, left = Store.put, after

    async def put_and_die(self: Store, objects: Mapping[str, bytes]) -> None:
        nonlocal left
        await put(self, objects)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    Store.put = put_and_die  # type: ignore[method-assign]


if __name__ == "__main__":
    make_mortal(int(os.environ.get("DIE_AFTER", "0")))
    days.PART_BYTES = int(os.environ.get("PART_BYTES", days.PART_BYTES))
    command_line(service, archive=group(archive))()
