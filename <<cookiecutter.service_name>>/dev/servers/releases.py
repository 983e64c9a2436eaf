"""Other versions of PostgreSQL and Kafka than the development stack's, from Maven, for tests."""

from __future__ import annotations

import os
import platform
import sys
import tarfile
import zipfile

from servers.java import Jars, require_jars
from servers.kafka import KAFKA_VERSION
from servers.postgres import Postgres, unprivileged_user
from servers.sources import LocalServers
from servers.state import Record, StateDirectory

OTHER_POSTGRES = {14: "14.24", 15: "15.19", 16: "16.15", 17: "17.11"}
"""The newest release in Maven of each major version except that of the wheel."""


class ReleasedPostgres(Postgres):
    """PostgreSQL of another major version: the server and `initdb`, without other programs."""

    locale = ("--locale=C",)

    def __init__(self, directory: StateDirectory, record: Record, major: int) -> None:
        super().__init__(directory, "postgres", record)
        self.version = OTHER_POSTGRES[major]

    def check_requirements(self) -> None:
        machine = "arm64v8" if platform.machine() in ("arm64", "aarch64") else "amd64"
        name = f"embedded-postgres-binaries-{sys.platform}-{machine}"
        artifact = f"io.zonky.test.postgres:{name}:{self.version}.0"
        jars = Jars("PostgreSQL", self.version, megabytes=15, artifacts=(artifact,))
        self.jars = require_jars(jars, self.directory.path / "maven.log")
        if os.geteuid() == 0:
            self.user_and_group = unprivileged_user()

    def prepare_binaries(self) -> None:
        folder = self.home.resolve() / "binaries"
        self.binaries = folder / "bin"
        if folder.exists():
            return
        (jar,) = self.jars.glob("*.jar")
        with zipfile.ZipFile(jar) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith(".txz"))
            with archive.open(name) as packed, tarfile.open(fileobj=packed, mode="r|xz") as files:
                files.extractall(folder, filter="data")
        self.give_to_user(folder)


class ReleasedServers(LocalServers):
    """Servers of these versions; without Kafka if its version is None."""

    def __init__(self, directory: StateDirectory, postgres: int, kafka: str | None) -> None:
        directory.state.postgres_alone = kafka is None
        super().__init__(directory)
        if postgres in OTHER_POSTGRES:
            self.postgres = ReleasedPostgres(directory, directory.state.postgres, postgres)
            self.servers[0] = self.postgres
        self.kafka.version = kafka or KAFKA_VERSION
