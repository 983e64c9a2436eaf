"""The list of traps, and that tests name each."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
TRAPS = """
1. Ids are assigned and committed in different orders: a cursor past 101 misses 100, which commits
    later
2. A cursor below the oldest running transaction stops behind a long one; a dump invalidates
    transaction ids
3. Transaction ids of one key are in commit order only if a row lock or version check precedes the
    outbox rows
4. `FOR UPDATE SKIP LOCKED` by row gives two rows of a key to two relays
5. A relay that was stopped overwrites the progress of its shards' next owner
6. One of three events is rejected, and the retry reorders them
7. Retries of the newest first, or delays of rows, reorder a key
8. One row of a key at a time makes a busy key slow
9. An inbox partitioned by time, with the time in its key, forgets duplicates at each boundary
10. The inbox forgets what the topic can still deliver
11. `INSERT … ON CONFLICT` waits for another insert: in varying order, batches deadlock
12. A consumer that has lost its partition commits after the new owner has begun
13. An offset is committed past a record still in work; offsets have gaps
14. The client library skips a record that it can't decode
15. A handler that raises fails its whole batch, and no attempt is counted
16. An outage of an hour uses up all retries
17. A consumer that can't continue leaves its group, which causes rebalances
18. `NOTIFY` in the business transaction takes a cluster-wide lock at commit
19. After a connection is lost during COMMIT, the outcome is unknown
20. An index serves the poll of a small table, but not of a large one
21. A transaction that waits for the broker holds back vacuum
22. Session locks, settings and prepared statements fail behind a pooler in transaction mode
23. The client drops a batch during a long outage of the broker
24. Two sources use the same id
25. Measurements on new tables don't hold for used ones without vacuum
26. A span for each empty poll fills the store of traces
27. Running transactions above a snapshot's xmax may have rows
28. A cached sequence assigns ids that break the order of a key
29. A partition is dropped because its highest transaction id is published, with uncommitted rows
30. A standby's snapshot lists no running transactions; that of a writing transaction omits its own
    rows
31. A key with the event's time makes each re-send new; two look-ups before two inserts find nothing
32. `version_id_col` counts flushes: events of one batch have the same version
33. aiokafka can't read zstd, lz4 and snappy without another package
34. Offsets that the broker has reset look like an empty topic
35. A stopped process keeps its transaction and locks until the server ends it
36. Debezium: an oversized event stops the connector; an idle slot retains the log
37. A pending detach already hides the partition's rows from checks
"""
"""Faults that well-known systems have had; docstrings of the tests against them name the number."""

NAMED = re.compile(r"\btraps? ((?:\d+)(?:(?:, | and )\d+)*)", re.IGNORECASE)


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_every_trap_of_the_list_is_held_off_by_a_test() -> None:
    named = {
        number
        for path in TESTS.rglob("test_*.py")
        for text in docstrings(path)
        for numbers in NAMED.findall(text)
        for number in re.findall(r"\d+", numbers)
    }
    listed = re.findall(r"^(\d+)\. ", TRAPS, re.MULTILINE)
    assert listed == [str(number) for number in range(1, 38)]
    assert named | {"36"} == set(listed)  # 36 is tested with the optional package `debezium`
