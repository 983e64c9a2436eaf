"""Time limits of a transaction."""

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from pipeline.apply.inbox import GENERATION_LOCK
from pipeline.settings import Settings

_LIMITS = """
       set_config('idle_in_transaction_session_timeout', {transaction_timeout}, true),
       set_config('lock_timeout', {lock_timeout}, true),
       set_config('pipeline.handler', {handler}, true)"""


_TRANSACTION_TIMEOUT = """,
       set_config('transaction_timeout', {transaction_timeout}, true)"""


_LOCK = """,
       pg_advisory_xact_lock_shared(:lock)
"""


_VALUES = {name: f":{name}" for name in ("transaction_timeout", "lock_timeout", "handler")}


_BEGIN = sa.text(f"SELECT {_LIMITS.format(**_VALUES)}{_LOCK}")


_BEGIN_WITH_TRANSACTION_TIMEOUT = sa.text(
    f"SELECT {(_LIMITS + _TRANSACTION_TIMEOUT).format(**_VALUES)}{_LOCK}"
)


def of_settings(settings: Settings, *, handler: str = "") -> dict[str, str]:
    """Return the limits of a transaction, as `begin` takes them.

    `handler` is the value of the setting `pipeline.handler`, see `AT_WORK` in
    `handlers/sessions.py`.
    """
    transaction, lock = (
        f"{round(seconds * 1000)}ms"
        for seconds in (settings.transaction_timeout, settings.lock_timeout)
    )
    return {"transaction_timeout": transaction, "lock_timeout": lock, "handler": handler}


def statement(connection: AsyncConnection, limits: Mapping[str, str]) -> str:
    """Return the statement that sets the limits again after a reset."""
    bounded = _is_bounded(connection)
    values = {name: f"'{value}'" for name, value in limits.items()}
    return f"SELECT {(_LIMITS + _TRANSACTION_TIMEOUT * bounded).format(**values)}"


async def begin(connection: AsyncConnection, limits: Mapping[str, str]) -> None:
    """Set the transaction's limits and prevent rotation until it ends. Its first statement.

    The lock is granted after the statement's snapshot was taken, so what the lock protects must be
    read by a later statement.
    """
    statement = _BEGIN_WITH_TRANSACTION_TIMEOUT if _is_bounded(connection) else _BEGIN
    await connection.execute(statement, {"lock": GENERATION_LOCK, **limits})


def _is_bounded(connection: AsyncConnection) -> bool:
    """Whether the server has transaction_timeout, which was added in PostgreSQL 17."""
    return (connection.dialect.server_version_info or (0,)) >= (17,)
