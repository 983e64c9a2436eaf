"""Markers and events are found by the key of their record, without an index that each message pays.

Partitions that are made have an index of summaries, which rounds of retention write.
"""

from collections.abc import Callable

import asyncpg
import pytest

from onceward.apply.inbox import _LONGEST_KEY
from onceward.retention import statements as retention_statements
from onceward.retention.maintenance import run_retention
from onceward.settings import Settings

from .applier import Applier
from .bank import Bank
from .plans import Explaining, only
from tests.contract.bank import Deposit

FILL = """
INSERT INTO pipeline.inbox (generation, key, hash, hash_version, consumer, source, id, type, topic,
                            partition, "offset", traceparent, record_key)
SELECT 1, decode(md5(n::text), 'hex'), 'hash', 0, 'deposit', '/tests', 'event-' || md5(n::text),
       'deposited', 't', 0, n, repeat('t', 120),
       ('key-' || n % ($1::integer / 3))::bytea
  FROM generate_series(1, $1::integer) AS n
"""
UNSUMMARIZED = (
    f"SELECT sum(brin_summarize_new_values) FROM ({retention_statements.SUMMARIZE_INDEXES}) AS done"
)
"""How many ranges of pages were not summarized before this statement."""
WITHOUT = """
SELECT relname FROM pg_inherits AS part JOIN pg_class ON pg_class.oid = part.inhrelid
 WHERE part.inhparent IN ('pipeline.inbox'::regclass, 'pipeline.outbox'::regclass)
   AND NOT EXISTS (
       SELECT FROM pg_index JOIN pg_inherits AS of_index ON of_index.inhrelid = indexrelid
        WHERE indrelid = part.inhrelid AND of_index.inhparent IN (
              'pipeline.inbox_find_idx'::regclass, 'pipeline.outbox_find_idx'::regclass))
"""


async def test_a_marker_has_the_key_of_its_record_unless_that_is_long(
    ledger: tuple[Bank, Applier], db: asyncpg.Connection
) -> None:
    _, applier = ledger
    await applier.apply(
        Deposit(1),
        Deposit(2, key=None),
        Deposit(3, "x" * _LONGEST_KEY),
        Deposit(4, "x" * (_LONGEST_KEY + 1)),
        Deposit(5, "x" * 1_000_000, value=b'{"account": "ada", "amount": 5}'),
    )
    rows = await db.fetch("SELECT id, record_key FROM pipeline.inbox ORDER BY id")
    keys = {row["id"]: row["record_key"] for row in rows}
    assert keys == {"1": b"ada", "2": None, "3": b"x" * _LONGEST_KEY, "4": None, "5": None}


async def test_partitions_that_are_made_have_the_index(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await run_retention(db, settings(inbox_generations_ahead=4, outbox_days_ahead=9))
    assert await db.fetch(WITHOUT) == []


async def test_a_round_of_retention_summarizes_what_was_written(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await db.execute(FILL, 20_000)
    await run_retention(db, settings())
    assert await db.fetchval(UNSUMMARIZED) == 0
    await db.execute("DELETE FROM pipeline.inbox")
    await db.execute(FILL, 60_000)
    assert await db.fetchval(UNSUMMARIZED) > 0, "else the round had nothing to do"


async def test_a_round_ends_also_if_nothing_can_be_summarized(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await db.execute("DROP INDEX pipeline.inbox_find_idx")
    before = await db.fetchval("SELECT finished_at FROM pipeline.retention_round")
    await run_retention(db, settings())
    assert await db.fetchval("SELECT finished_at FROM pipeline.retention_round") > before


@pytest.mark.full
async def test_a_key_is_found_among_many_markers(
    db: asyncpg.Connection, settings: Callable[..., Settings]
) -> None:
    await db.execute(FILL, 300_000)
    await run_retention(db, settings())
    await db.execute("VACUUM ANALYZE pipeline.inbox")
    asked = Explaining(db)
    found = await asked.fetch("SELECT id FROM pipeline.inbox WHERE record_key = $1", b"key-17")
    assert len(found) == 3
    plan = only(asked)
    assert (plan.indexes, plan.scanned) == ({"inbox_find_idx"}, set())
    pages = await db.fetchval("SELECT pg_relation_size('pipeline.inbox_g1') / 8192")
    assert plan.blocks < 0.1 * pages
