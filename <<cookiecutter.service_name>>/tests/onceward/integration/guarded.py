"""PostgreSQL that lets in by TLS alone: Debian's, as that of the wheel is built without OpenSSL."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from servers.network import LOOPBACK
from servers.postgres import Postgres
from servers.state import StateDirectory

from .certificates import Authority, Certificate
from tests.servers.programs import program, running

_WHO_IS_LET_IN = f"""
hostssl all service {LOOPBACK}/32 scram-sha-256
hostssl all all     {LOOPBACK}/32 cert clientcert=verify-full
"""


class GuardedPostgres(Postgres):
    """Its superuser has a password; everybody else is who their certificate says."""

    locale = ("--locale=C",)
    own: Certificate
    trusted: Authority

    def check_requirements(self) -> None:
        """Find Debian's."""
        super().check_requirements()
        self.installation = program("postgres").resolve().parents[1]

    def create_data(self) -> None:
        """Let only those in who come by TLS."""
        super().create_data()
        (self.data / "pg_hba.conf").write_text(_WHO_IS_LET_IN)
        for name, file in self._files.items():
            shutil.copy(file, self.data / name)
            (self.data / name).chmod(0o600)
        self.give_to_user(self.data)

    def command(self) -> list[str]:
        """Trade safety in a power failure, which no test has, for speed."""
        files = [f"--ssl_{name}_file={name}" for name in self._files]
        return [*super().command(), "--fsync=off", "--ssl=on", *files]

    @property
    def _files(self) -> dict[str, Path]:
        return {"cert": self.own.file, "key": self.own.key, "ca": self.trusted.file}

    @property
    def url(self) -> str:
        """Where the superuser finds it."""
        password = self.directory.state.password
        return f"postgresql+asyncpg://service:{password}@{LOOPBACK}:{self.port}/service"


@contextmanager
def guarding(own: Certificate, trusted: Authority) -> Iterator[GuardedPostgres]:
    """Start a server with this certificate, which trusts this authority, and remove it at the end.

    Any user but the superuser needs a certificate that the authority has made out to its name.
    """
    with TemporaryDirectory() as folder:
        directory = StateDirectory(Path(folder))
        server = GuardedPostgres(directory, "postgres", directory.state.postgres)
        server.own, server.trusted = own, trusted
        try:
            with running(server):
                yield server
        finally:
            server.remove()
