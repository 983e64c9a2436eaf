"""Handlers at work: called one after the other, in one transaction."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import asyncpg
import pydantic_core
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

from . import telemetry
from .aggregate import Aggregate, Key
from .batch import Item
from .failures import is_of_the_database
from .outbox import Outbox
from .transaction import Rows, Transaction


@dataclass(eq=False)
class Attempt:
    """What the handlers of one transaction share, and which of them is at work."""

    session: AsyncSession
    driver: asyncpg.Connection
    rows: Rows
    outbox: Outbox
    group: str
    task: asyncio.Task[object] | None = field(default_factory=asyncio.current_task)
    call: tuple[Item, asyncio.Timeout] | None = None

    def deaf(self, seconds: float) -> Item | None:
        """Return the message whose handler goes on so long after it was cancelled."""
        if self.call is None:
            return None
        item, timer = self.call
        cancelled_at = timer.when() or 0.0  # of a time-out without a time, which it never is
        return item if asyncio.get_running_loop().time() > cancelled_at + seconds else None


@dataclass
class Handled:
    """How the handlers have fared."""

    applied: list[Item] = field(default_factory=list)
    returned: dict[bytes, str] = field(default_factory=dict)
    """What they returned, as JSON, by marker key."""
    failed: list[tuple[Item, BaseException]] = field(default_factory=list)
    """The first of them has failed by itself, the others maybe because of it."""
    is_cut_off: bool = False
    """Whether a statement may still be under way on the connection."""


class _Failed(Exception):
    """A handler has failed on a message."""

    def __init__(self, error: BaseException, *, is_cut_off: bool = False) -> None:
        super().__init__()
        self.error = error
        self.is_cut_off = is_cut_off


async def handle_all(items: Sequence[Item], attempt: Attempt) -> Handled:
    """Lock the rows that handlers have declared, and call the handlers in order.

    After one has failed the transaction is lost. The others are tried all the same, to find out
    who else fails; not those that have their order with one that failed.
    """
    for entity, keys in _declared(items):
        await attempt.rows.lock(entity, keys)
    handled = Handled()
    behind: set[bytes] = set()
    for item in items:
        if behind and item.order_key in behind:
            continue
        try:
            result = await _handle(item, attempt)
            if result is not None:
                handled.returned[item.marker.key] = result
            handled.applied.append(item)
        except _Failed as failure:
            handled.failed.append((item, failure.error))
            behind.add(item.order_key)
            if failure.is_cut_off:
                handled.is_cut_off = True
                break
            if len(handled.failed) == 1:
                # Aborted by the error of a statement, it would fail for everybody.
                await attempt.driver.execute("SELECT")
        except Exception:
            if handled.failed:
                break
            raise
    return handled


async def _handle(item: Item, attempt: Attempt) -> str | None:
    """Call the handler; returns what it returned, as JSON."""
    message, consumer = item.marker.message, item.handler.consumer
    tx = Transaction(
        session=attempt.session,
        rows=attempt.rows,
        outbox=attempt.outbox,
        consumer=consumer,
        message=message,
    )
    timer = asyncio.timeout(item.handler.timeout)
    attempt.call = item, timer
    try:
        with tx, telemetry.process_span(message, consumer, attempt.group):
            async with timer:
                result = await item.handler.function(item.event, tx)
        return (
            None
            if result is None
            else pydantic_core.to_json(result, inf_nan_mode="strings").decode()
        )
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _Failed(error) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit() too, and the panic of a library that is not Python
        if timer.expired():
            late = TimeoutError(f"{consumer} takes longer than {item.handler.timeout} s")
            late.__cause__ = error  # which tells where it was
            raise _Failed(late, is_cut_off=True) from error
        if is_of_the_database(error) or attempt.driver.is_closed():
            raise
        raise _Failed(error) from error
    finally:
        attempt.call = None


def _declared(items: Iterable[Item]) -> list[tuple[type[Aggregate], set[Key]]]:
    """Return the rows that the handlers are going to change, by table name."""
    wanted: dict[type[Aggregate], set[Key]] = {}
    for item in items:
        if (loads := item.handler.loads) and item.event is not None:
            wanted.setdefault(loads.entity, set()).add(loads.key_of(item.event))
    return sorted(wanted.items(), key=lambda one: str(sa.inspect(one[0]).local_table.fullname))
