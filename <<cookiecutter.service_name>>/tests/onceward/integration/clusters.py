"""Servers that a test may stop: PostgreSQL clusters, which are also copied, and a broker."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from servers.console import run_step
from servers.kafka import Kafka
from servers.network import LOOPBACK
from servers.postgres import Postgres, installation
from servers.releases import ReleasedServers
from servers.sources import DATABASE_URL
from servers.state import StateDirectory
from sqlalchemy import make_url

from .brokers import ConfiguredKafka
from tests.servers.programs import require_what_it_needs, running

ARCHIVING = ("--archive-mode=on", "--archive-command=cp %p ../archive/%f")
"""Options of a cluster that archives its WAL: `restore` can then end at a transaction."""
_RECOVERY = """
restore_command = 'cp ../archive/%f %p'
recovery_target_xid = '{xid}'
recovery_target_action = 'promote'
hot_standby = off
"""


class Cluster(Postgres):
    """A cluster of its own, or a copy of another, with that one's users and passwords."""

    origin: "Cluster | None" = None
    copy_options: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Trade safety in a power failure, which no test has, for speed."""
        return [*super().command(), "--fsync=off", *self.options]

    def create_data(self) -> None:
        """Fill the data directory before the first start."""
        if self.origin is None:
            super().create_data()
            # Its transaction ids exceed 32 bits, and those of every server that is not private.
            self._call("pg_resetwal", "--epoch=1", f"--pgdata={self.data}")
            self._make_folder(self.data.with_name("archive"))
        else:
            self._copy(self.origin, self.data, *self.copy_options)

    def url(self, database: str = "service") -> str:
        """Return where the superuser finds a database."""
        password = self.directory.state.password
        return f"postgresql+asyncpg://service:{password}@{LOOPBACK}:{self.port}/{database}"

    def crash(self) -> None:
        """End it as a failing machine would: nothing is finished, and nothing is written."""
        self.send(signal.SIGQUIT)
        self.stop()

    def back_up(self) -> None:
        """Copy the running cluster; the copy ends at the moment when this returns."""
        self._copy(self, self._backup)

    def restore(self, *, to: int | None = None) -> None:
        """Start the backup in the place of the cluster, which is lost.

        With `to` the archive is replayed until this transaction has committed.
        """
        if to is None:
            self.crash()
        else:
            self.stop()  # which archives the rest
        shutil.rmtree(self.data)
        self._backup.rename(self.data)
        if to is not None:
            with (self.data / "postgresql.auto.conf").open("a") as settings:
                settings.write(_RECOVERY.format(xid=to % 2**32))  # without its epoch
            (self.data / "recovery.signal").touch()
            self.give_to_user(self.data / "recovery.signal")
        self.start()
        self.wait_until_serving()

    @property
    def _backup(self) -> Path:
        return self.home.resolve() / "backup"

    def _copy(self, origin: "Cluster", target: Path, *options: str) -> None:
        self._make_folder(target)
        source = _libpq(origin.url("postgres"))
        self._call(
            "pg_basebackup", f"--dbname={source}", f"--pgdata={target}", "--checkpoint=fast",
            "--no-sync", *options,
        )  # fmt: skip

    def _make_folder(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(mode=0o700)
        self.give_to_user(path)

    def _call(self, program: str, *arguments: str) -> None:
        command = [str(self.binaries / program), *arguments]
        run_step(command, self.log, f"{program} has failed.", **self.process_options)


@contextmanager
def private(*options: str) -> Iterator[Cluster]:
    """Start a new cluster, and remove it at the end of the block."""
    with _started(None, options=options) as cluster:
        yield cluster


@contextmanager
def private_of(major: int) -> Iterator[str]:
    """Start a server of another major version, and remove it at the end; its URL."""
    with TemporaryDirectory() as folder:
        servers = ReleasedServers(StateDirectory(Path(folder)), major, kafka=None)
        require_what_it_needs(servers.postgres)
        try:
            servers.up()
            yield servers.addresses()[DATABASE_URL]
        finally:
            servers.down(purge=True)


_SECOND = """
process.roles=broker
node.id=2
listeners=PLAINTEXT://{client}
controller.quorum.voters=1@{controller}
"""


class SecondBroker(ConfiguredKafka):
    """Another broker of the cluster that a first one is the controller of."""

    controller: str

    def more_settings(self, *addresses: str) -> str:
        """Follow that controller."""
        return _SECOND.format(client=addresses[0], controller=self.controller)


@contextmanager
def private_broker(first: Kafka | None = None) -> Iterator[Kafka]:
    """Start a new broker, or a second one beside the first, and remove it at the block's end."""
    with TemporaryDirectory() as folder:
        directory = StateDirectory(Path(folder))
        kind = SecondBroker if first else Kafka
        kafka = kind(directory, "kafka", directory.state.kafka)
        if first and isinstance(kafka, SecondBroker):
            kafka.controller = f"{LOOPBACK}:{first.record.ports[1]}"
        try:
            with running(kafka):
                yield kafka
        finally:
            kafka.remove()


@contextmanager
def copied(origin: Cluster) -> Iterator[Cluster]:
    """Start a copy of a running cluster beside it, as after a restore elsewhere."""
    with _started(origin) as cluster:
        yield cluster


@contextmanager
def standing_by(origin: Cluster) -> Iterator[Cluster]:
    """Start an asynchronous standby of a running cluster, with no less than that one allows."""
    with _started(origin, "--write-recovery-conf", options=origin.options) as cluster:
        yield cluster


@contextmanager
def _started(
    origin: Cluster | None,
    *copy_options: str,
    options: tuple[str, ...] = (),
) -> Iterator[Cluster]:
    with TemporaryDirectory() as folder:
        directory = StateDirectory(Path(folder))
        if origin is not None:
            directory.state.password = origin.directory.state.password
        cluster = Cluster(directory, "postgres", directory.state.postgres)
        cluster.origin, cluster.copy_options = origin, copy_options
        cluster.options = options
        try:
            with running(cluster):
                yield cluster
        finally:
            cluster.remove()


def dump(url: str, file: Path) -> None:
    """Write a database into a file."""
    _call_client("pg_dump", "--format=custom", f"--file={file}", _libpq(url))


def load(file: Path, url: str) -> None:
    """Restore a dump into an empty database, all of it as the user in the URL."""
    _call_client("pg_restore", "--no-owner", "--exit-on-error", f"--dbname={_libpq(url)}", file)


def _call_client(program: str, *arguments: str | Path) -> None:
    subprocess.run([installation() / "bin" / program, *arguments], check=True)


def _libpq(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
