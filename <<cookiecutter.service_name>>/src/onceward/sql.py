"""The statements that the engine executes, by room, for an administrator of databases to review.

They are the constants of the modules of statements. The text below each says what it does, what it
locks, and by which index it finds rows. Names in braces are put in when a statement is executed.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import asyncpg

from onceward.apply import statements as of_apply
from onceward.consume import statements as of_consume
from onceward.handlers import statements as of_handlers
from onceward.operators import adopt_statements, stop_statements
from onceward.operators import statements as of_operators
from onceward.relay import statements as of_relay
from onceward.retention import partition_statements
from onceward.retention import statements as of_retention
from onceward.retry import count_statements
from onceward.retry import statements as of_retry
from onceward.servers import statements as of_servers

MODULES = (
    *(of_consume, of_apply, of_handlers),
    *(of_retry, count_statements),
    of_relay,
    *(of_retention, partition_statements),
    of_servers,
    *(of_operators, stop_statements, adopt_statements),
)

_PLANNED = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b")
_OTHERS = re.compile(r"\s*(ALTER TABLE|CREATE TABLE|DROP TABLE|LOCK TABLE|RESET|SAVEPOINT)\b")
_PARAMETER = re.compile(r"\$(\d+)")
_PUT_IN = re.compile(r"\{[a-z]+\}")
"""A part that is put in when the statement is executed, such as the name of a partition."""
_NAMED = re.compile(r"\(:\w+\)")
"""A parameter of SQLAlchemy, in parentheses."""


class Statement(NamedTuple):
    """A statement, and what its module says about it."""

    room: str
    name: str
    comment: str
    """What it does, with a line that begins with `Locks:` and one that begins with `Plan:`."""
    sql: str


def is_statement(value: object) -> TypeGuard[str]:
    """Whether a constant of a module of statements is one, and not a part of some."""
    return isinstance(value, str) and bool(_PLANNED.match(value) or _OTHERS.match(value))


def statements() -> Iterator[Statement]:
    """Yield the statements of all rooms."""
    for module in MODULES:
        *_, room, _ = module.__name__.split(".")
        for node, below in pairwise(ast.parse(inspect.getsource(module)).body):
            match node, below:
                case (
                    ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=str(comment))),
                ) if not name.startswith("_"):
                    sql = vars(module)[name]
                    if is_statement(sql):
                        text = inspect.cleandoc(comment)
                        yield Statement(room, name.lower(), text, sql.strip("\n"))


async def explain(connection: asyncpg.Connection, sql: str) -> str:
    """Return the plan of a statement for unknown parameters, or that PostgreSQL makes none.

    The statement is not executed. It needs the rights that executing needs.
    """
    if _OTHERS.match(sql):
        return "PostgreSQL makes no plan for it"
    if _PUT_IN.search(sql):
        return "what is put in for the names in braces decides about the plan"
    sql = _NAMED.sub("($1)", sql)
    numbers = [int(number) for number in _PARAMETER.findall(sql)]
    nulls = f" ({', '.join(['NULL'] * max(numbers))})" if numbers else ""
    async with connection.transaction():
        await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE explained AS {sql}")
        try:
            async with connection.transaction():
                rows = await connection.fetch(f"EXPLAIN EXECUTE explained{nulls}")
        finally:  # it would outlast the transaction
            await connection.execute("DEALLOCATE explained")
    return "\n".join(row[0] for row in rows)
