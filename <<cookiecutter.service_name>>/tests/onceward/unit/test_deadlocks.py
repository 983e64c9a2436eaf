"""What the log says of a deadlock, whatever the language of the server."""

import asyncpg
import pytest

from onceward.apply.deadlocks import describe_deadlock


@pytest.mark.parametrize(
    ("context", "table"),
    [
        ('while locking tuple (0,1) in relation "account"\nSQL statement "SELECT 1"', "account"),
        ("beim Sperren von Tupel (0,1) in Relation »account«", "account"),
        (
            "lors du verrou de la ligne (0,1) dans la relation «\N{NO-BREAK SPACE}account »",
            "account",
        ),
        ('锁定关系"account"中的元组(0, 1)时', "account"),
        ('SQL statement "UPDATE account SET place = (1,2)"', None),
        (None, None),
    ],
)
def test_the_table_of_a_deadlock_is_named_and_no_statement(
    context: str | None, table: str | None
) -> None:
    error = asyncpg.DeadlockDetectedError("deadlock detected")
    error.context = context

    said = describe_deadlock(ExceptionGroup("of tasks", [KeyError("a"), error]), [])

    assert said.startswith(f"deadlock over {table} of" if table else "deadlock of")
    assert "UPDATE" not in said
