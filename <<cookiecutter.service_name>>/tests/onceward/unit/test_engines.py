"""Engines that speak PostgreSQL's protocol and can't carry the service, by what they print."""

from typing import Any

import pytest
from sqlalchemy.dialects.postgresql import asyncpg

from onceward.servers.revisions import WrongDatabase, must_fit, refuse_engine

COCKROACH = "CockroachDB CCL v24.3.5 (x86_64-pc-linux-gnu, built 2025/02/03 17:28:15, go1.22.8)"
POSTGRES = "PostgreSQL 16.9 on x86_64-pc-linux-gnu, compiled by gcc (GCC) 12.3.0, 64-bit"


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (COCKROACH, "CockroachDB"),
        ("PostgreSQL 15.2-YB-2025.1.2.0-b0 on x86_64-pc-linux-gnu", "YugabyteDB"),
        ("PostgreSQL 11.2-YB-2024.2.8.0-b0 on x86_64-pc-linux-gnu", "YugabyteDB"),
    ],
)
def test_an_engine_is_refused_by_its_version(version: str, name: str) -> None:
    with pytest.raises(WrongDatabase, match=f"the database is {name}, which speaks") as error:
        must_fit("parcels", None, "UTF8", version, is_dsql=False)
    assert "name a PostgreSQL server" in str(error.value)


def test_aurora_dsql_is_refused_by_its_catalog() -> None:
    """Its `version()` is one of PostgreSQL's."""
    with pytest.raises(WrongDatabase, match="Aurora DSQL"):
        must_fit("parcels", None, "UTF8", "PostgreSQL 16", is_dsql=True)


@pytest.mark.parametrize(
    "version",
    [
        POSTGRES,
        "PostgreSQL 18.0 (Debian 18.0-1.pgdg12+1) on aarch64-unknown-linux-gnu",
        "PostgreSQL 14.5 on x86_64-pc-linux-gnu, compiled by Debian clang version 12.0.1, 64-bit",
    ],
)
def test_postgresql_is_not_refused(version: str) -> None:
    must_fit("parcels", "parcels", "UTF8", version, is_dsql=False)


class Answering:
    """Answers every statement by one text, as the connection that SQLAlchemy asks for a version."""

    def exec_driver_sql(self, statement: str) -> "Answering":
        assert "version()" in statement
        return self

    def scalar(self) -> str:
        return COCKROACH


def test_an_engine_is_recognized_by_sqlalchemys_error_for_an_unreadable_version() -> None:
    dialect: Any = asyncpg.dialect
    with pytest.raises(AssertionError) as unread:
        dialect()._get_server_version_info(Answering())
    with pytest.raises(WrongDatabase, match="the database is CockroachDB"):
        refuse_engine(str(unread.value))
