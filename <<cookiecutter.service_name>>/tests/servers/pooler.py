"""PgBouncer in transaction mode between services and PostgreSQL, for `make test-pooler`."""

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import programs
import pytest
from servers.network import free_port
from sqlalchemy import make_url

from .programs import program
from .waiting import PATIENCE


def _version() -> tuple[int, ...]:
    command = [programs.program("pgbouncer").find() or "pgbouncer", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"\d+", found)[:2])


POOLED = os.environ.get("TEST_POOLER") == "1"
"""Whether the tests reach their databases through PgBouncer."""

CANCELLING = pytest.mark.skipif(
    POOLED and _version() < (1, 21),
    reason="PgBouncer before 1.21 may exit when a statement is cancelled (its issues 801, 822)",
)
"""Marks tests in which a statement is cancelled."""

_INI = """
[databases]
* = host={host} port={port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {users}
pool_mode = transaction
max_client_conn = 1000
default_pool_size = 120
max_db_connections = 120
server_idle_timeout = 2
"""


@dataclass
class Pooler:
    """A PgBouncer that runs."""

    url: str
    """Leads through it."""
    config: Path
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """Let clients wait, and disconnect from the server when its transactions have ended."""
        self.process.send_signal(signal.SIGUSR1)

    def resume_at(self, port: int) -> None:
        """Go on with another server, without closing the clients' connections."""
        old = self.config.read_text()
        self.config.write_text(
            re.sub(r"^(\* = .*port=)\d+", rf"\g<1>{port}", old, flags=re.MULTILINE)
        )
        self.process.send_signal(signal.SIGHUP)
        self.process.send_signal(signal.SIGUSR2)


@contextmanager
def pooling(server_url: str, settings: str = "") -> Iterator[Pooler]:
    """Run PgBouncer before the server; of what the settings repeat, theirs is what counts."""
    pgbouncer = program("pgbouncer")
    server = make_url(server_url)
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        users, config, log = (folder / one for one in ("users.txt", "pgbouncer.ini", "log"))
        users.write_text(f'"{server.username}" "{server.password}"\n')
        common = _INI.format(host=server.host, port=server.port, own=port, users=users)
        config.write_text(common + settings)
        # It refuses to run as root.
        user = ["-u", "nobody"] if os.geteuid() == 0 else []
        with log.open("wb") as output:
            process = subprocess.Popen(
                [pgbouncer, *user, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            _wait_for(port, process, log)
            url = server.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
            yield Pooler(url, config, process)
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"PgBouncer does not start:\n{log.read_text()}", pytrace=False)
