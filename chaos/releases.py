"""Releases: the rig brings out one after the other while the service works, as its platform would.

Each has a column of its own in `parcel`, which its handler reads and writes, in place of the column
of the one before. So it comes in the order that needs no pause: *expand*, a migration that the
release before does not mind; then process after process is replaced; then *contract*, a migration
that takes away what no process knows any more.
"""

import asyncio
import shutil
from collections import Counter
from pathlib import Path

from chaos.edit import Edit
from chaos.system import Member, System
from demo.processes import PACKAGE, ProcessFailed

AGAIN_AFTER = 0.3
"""Seconds until a migration is tried again; the database may be away."""
READY_WITHIN = 10.0
"""Seconds; a server may be away, and then the next process does not wait for this one."""
TABLES = (
    Edit(
        "tables.py",
        "    scans: Mapped[int]\n",
        '    scans: Mapped[int]\n    release: Mapped[int | None] = mapped_column("{column}")\n',
    ),
    Edit(
        "tables.py",
        "        self.scans += 1\n",
        "        self.release = (self.release or 0) + 1\n        self.scans += 1\n",
    ),
)
MIGRATION = '''"""{what} a release.

Revision ID: {revision}
Revises: {head}
"""

from alembic import op

revision, down_revision, branch_labels, depends_on = "{revision}", "{head}", None, None


def upgrade() -> None:
    """Apply it."""
    op.execute("ALTER TABLE parcel {change}")
'''


class Releases:
    """Those of the service that lies in `project`."""

    def __init__(self, system: System, project: Path) -> None:
        self._system = system
        self._project = project
        self._next = project.with_name(f"{project.name}-next")
        self._source = project / "src" / PACKAGE
        self._first = (self._source / "tables.py").read_text("utf-8")
        self._head = "service_0001"
        self._number = 0
        self.migrated = Counter[str]()
        """Migrations that were applied, by what they do."""
        self._busy = asyncio.Lock()

    async def roll_out(self, seconds: float) -> None:
        """Bring out the next one, so long after each other in its processes."""
        async with self._busy:
            before, self._number = self._number, self._number + 1
            await self._migrate("expand", f"ADD COLUMN release_{self._number} integer")
            self._write()
            for member in self._system.members.values():
                await self._replace(member)
                await asyncio.sleep(seconds)
            if before:
                await self._migrate("contract", f"DROP COLUMN release_{before}")

    async def _migrate(self, what: str, change: str) -> None:
        revision = f"release_{self._number}_{what}"
        text = MIGRATION.format(what=what, revision=revision, head=self._head, change=change)
        self._head = revision
        # Of a folder of its own, as a release's image is: where the processes work it would be
        # missing in the database meanwhile, and who starts then would refuse to.
        shutil.rmtree(self._next, ignore_errors=True)
        copied: Path = shutil.copytree(
            self._project / "migrations",
            self._next / "migrations",
            ignore=shutil.ignore_patterns("__pycache__"),  # processes write there meanwhile
        )
        shutil.copy(self._project / "alembic.ini", self._next)
        written = copied / "versions" / f"{revision}.py"
        written.write_text(text, "utf-8")
        service = next(iter(self._system.members.values())).service
        while True:
            try:
                await service.command("migrate", log=self._system.setup_log, folder=self._next)
            except ProcessFailed:
                await asyncio.sleep(AGAIN_AFTER)
            else:
                break
        shutil.copy(written, self._project / "migrations" / "versions")
        self.migrated[what] += 1

    def _write(self) -> None:
        """Put the release's code in the place of that before; who starts from now on is of it."""
        (self._source / "tables.py").write_text(self._first, "utf-8")
        for edit in TABLES:
            new = edit.new.format(column=f"release_{self._number}")
            Edit(edit.module, edit.old, new).apply(self._source)

    async def _replace(self, member: Member) -> None:
        """Ask a process to end, and start the next one; one that a fault has stopped comes later.

        One that joined for a while is waited for: it may be of the release before.
        """
        async with member.busy:
            if member.service.pid is None:
                return
            await self._system.end(member)
            await member.service.start()
        try:
            async with asyncio.timeout(READY_WITHIN):
                while await member.service.obstacle():  # noqa: ASYNC110  # another process
                    await asyncio.sleep(AGAIN_AFTER)
        except TimeoutError:
            pass
