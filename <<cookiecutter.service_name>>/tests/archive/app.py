"""A service that archives, as a program: `python -m tests.archive.app`."""

import os

from sqlalchemy import MetaData

from archive import Archive, days
from archive.commands import group
from pipeline import Handlers, Service
from pipeline.commands import command_line

NAME = "orders"

archive = Archive(NAME)
service = Service(NAME, handlers=Handlers(), metadata=MetaData(), archive=archive)

if __name__ == "__main__":
    days.PART_BYTES = int(os.environ.get("PART_BYTES", days.PART_BYTES))
    command_line(service, archive=group(archive))()
