"""How PostgreSQL carries a statement out: by which indexes, and over how many blocks."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import asyncpg
from servers.releases import OTHER_POSTGRES

from .clusters import private_of

MAJOR_VERSIONS = ["newest", *OTHER_POSTGRES]
"""Those that plans are tested on; each plans in its own way."""


def server_of(major: int | str, newest: str) -> AbstractContextManager[str]:
    """Start a server of this major version unless it is the newest, which runs; its URL."""
    return private_of(major) if isinstance(major, int) else nullcontext(newest)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Lend a connection."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def execute(url: str, *statements: str) -> None:
    """Execute statements, each as a transaction of its own."""
    async with connected(url) as connection:
        for statement in statements:
            await connection.execute(statement)


@dataclass(frozen=True)
class Plan:
    """How a statement was executed."""

    statement: str
    indexes: set[str]
    """Indexes that it went through, by the names that they have at the parent of partitions."""
    scanned: set[str]
    """Large tables that it read from the beginning to the end."""
    blocks: int
    """Blocks of 8 kB that it looked at, each time that it did."""


class Explaining:
    """A connection that asks for the plan of every statement before it executes it."""

    def __init__(self, db: asyncpg.Connection) -> None:
        self._db = db
        self.plans: list[Plan] = []

    async def fetch(self, query: str, *arguments: object) -> Any:
        await self._explain(query, arguments)
        return await self._db.fetch(query, *arguments)

    async def fetchrow(self, query: str, *arguments: object) -> Any:
        await self._explain(query, arguments)
        return await self._db.fetchrow(query, *arguments)

    async def fetchval(self, query: str, *arguments: object) -> Any:
        await self._explain(query, arguments)
        return await self._db.fetchval(query, *arguments)

    async def execute(self, query: str, *arguments: object) -> Any:
        await self._explain(query, arguments)
        return await self._db.execute(query, *arguments)

    async def _explain(self, query: str, arguments: Sequence[object]) -> None:
        asked_for = (await self._db.prepare(query)).get_parameters()
        types = ", ".join(f"{one.schema}.{one.name}" for one in asked_for)
        # EXPLAIN of a statement with parameters knows their values: only EXECUTE may be generic.
        await self._db.execute(f"PREPARE asked {types and f'({types})'} AS {query}")
        values = ", ".join(map(_literal, arguments))
        asked = f"EXECUTE asked {values and f'({values})'}"
        attempt = self._db.transaction()
        await attempt.start()
        found = await self._db.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {asked}")
        await attempt.rollback()
        await self._db.execute("DEALLOCATE asked")
        top = json.loads(found)[0]["Plan"]
        indexes, scanned = await self._read_by(top)
        blocks = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
        self.plans.append(Plan(query, indexes, scanned, blocks))

    async def _read_by(self, top: dict[str, Any]) -> tuple[set[str], set[str]]:
        names = await self._db.fetch(
            "SELECT table_.relname AS table, index_.relname AS index,"
            "       coalesce(whole.relname, index_.relname) AS whole"
            "  FROM pg_index JOIN pg_class table_ ON table_.oid = indrelid"
            "  JOIN pg_class index_ ON index_.oid = indexrelid"
            "  LEFT JOIN pg_inherits ON inhrelid = indexrelid"
            "  LEFT JOIN pg_class whole ON whole.oid = inhparent"
            " WHERE pg_relation_size(indrelid) > 500000"
        )
        whole = {row["index"]: row["whole"] for row in names}
        tables = {row["table"] for row in names}
        nodes = [top]
        for node in nodes:
            nodes += node.get("Plans", [])
        ran = [node for node in nodes if node["Actual Loops"]]
        return (
            {whole[node["Index Name"]] for node in ran if node.get("Index Name") in whole},
            {
                node["Relation Name"]
                for node in ran
                if node["Node Type"] == "Seq Scan" and node["Relation Name"] in tables
            },
        )


def _literal(value: object) -> str:
    return "NULL" if value is None else "'" + _text(value).replace("'", "''") + "'"


def _text(value: object) -> str:
    match value:
        case bytes():
            return f"\\x{value.hex()}"
        case list():
            quoted = ("NULL" if one is None else json.dumps(_text(one)) for one in value)
            return "{" + ",".join(quoted) + "}"
        case (int(xmin), int(xmax), tuple(running)):
            return f"{xmin}:{xmax}:{','.join(map(str, running))}"
        case tuple():
            fields = ("" if one is None else json.dumps(_text(one)) for one in value)
            return "(" + ",".join(fields) + ")"
        case _:
            return str(value)


def only(asked: Explaining) -> Plan:
    """Return the plan of the only statement."""
    (plan,) = asked.plans
    return plan
