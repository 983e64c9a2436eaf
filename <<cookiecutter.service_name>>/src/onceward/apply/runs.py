"""Runs: consecutive messages with one session and one flush, which take effect or fail together."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from onceward.errors import Repeat
from onceward.observe import metrics
from onceward.observe.watchdog import CALLS
from onceward.servers.guard import GUARD, HAS_ENDED, HandlerFault

from . import backlog, inbox
from .attempt import Attempt
from .calls import call_handlers, lock_declared, raise_strays
from .failures import TooMuch, decide_isolated, failure_of, is_in_vain, is_nobodys
from .item import Item
from .ladder import Rung
from .outcome import BatchOutcome
from .positions import Generations

_MOST_SAVEPOINTS = 60
"""PostgreSQL keeps 64 subtransactions of a transaction in memory, and finds others slowly."""


class Runs:
    """The messages of a transaction that are not applied yet, run by run.

    After a failure runs are half as long, and after a success twice as long again.
    """

    def __init__(self, items: Iterable[Item], most: int, suspects: Collection[bytes]) -> None:
        """`suspects` are marker keys of messages that have failed already, and are isolated."""
        self._left = deque(items)
        self._most = self._size = most
        self._suspects = suspects
        self._lengths: list[int] = []
        """Of the next runs, the last one first, after one that has failed."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def take(self) -> list[Item]:
        """Return the next run."""
        if self._lengths:
            return [self._left.popleft() for _ in range(self._lengths.pop())]
        run: list[Item] = []
        while self._left and len(run) < self._size:
            is_suspect = self._left[0].key in self._suspects
            if is_suspect and run:
                break
            run.append(self._left.popleft())
            if is_suspect:
                break
        return run

    def succeeded(self) -> None:
        """Let the next runs be longer."""
        self._size = min(2 * self._size, self._most)

    def failed(self, run: Sequence[Item], culprits: Sequence[Item]) -> None:
        """Divide a run: the messages before those whose call has failed, and these; halves if that
        is not known."""
        self._size = max(1, min(self._size, len(run)) // 2)
        if not culprits or len(culprits) == len(run):
            lengths = [len(run) // 2, len(run) - len(run) // 2]
        else:
            keys = {item.key for item in culprits}
            place = next(number for number, item in enumerate(run) if item.key in keys)
            rest = (item for item in run[place:] if item.key not in keys)
            run = [*run[:place], *culprits, *rest]
            lengths = [*([place] if place else []), len(culprits)]
        self._left.extendleft(reversed(run))
        self._lengths += reversed(lengths)


async def apply_runs(
    items: Sequence[Item],
    attempt: Attempt,
    generations: Generations,
    outcome: BatchOutcome,
    rung: Rung,
) -> None:
    """Apply messages in runs; divide a run that fails, until its message is isolated.

    Raises what the transaction does not survive.
    """
    # In one order for all runs, before any savepoint, whose rollback would release the locks.
    await lock_declared(items, attempt)
    # In sessions of their own failures can't be undone in memory.
    failed = {one.key for one in items if one.history.attempts and one.handler.queue in attempt.own}
    runs = Runs(items, rung.run or len(items), attempt.findings.suspects | failed)
    number = 0
    while runs:
        run = runs.take()
        number += 1
        if number > _MOST_SAVEPOINTS:
            raise TooMuch(f"more than {_MOST_SAVEPOINTS} savepoints are slow")
        point = await attempt.connection.begin_nested()
        attempt.begin_run(run)
        try:
            part = BatchOutcome(behind={*outcome.behind})
            await apply_run(run, attempt, generations, part)
            await point.commit()
            outcome.add(part)
            runs.succeeded()
        except Repeat:
            raise
        except Exception as error:
            failure = failure_of(error)
            is_over = attempt.is_lost or attempt.is_late or attempt.contention is not None
            if is_over or is_nobodys(failure.error):
                raise
            failure.with_traceback(None)  # it refers to this frame
            await attempt.undo_run(point)
            number -= 1
            if len(run) > 1:
                runs.failed(run, failure.items)
                continue
            decide_isolated(run[0], failure, outcome)
        if any(is_in_vain(consumer, outcome) for consumer in {item.consumer for item in run}):
            raise TooMuch("the breaker judges the failures of a smaller transaction")
    raise_strays(attempt, outcome)


async def apply_run(
    items: Sequence[Item],
    attempt: Attempt,
    generations: Generations,
    outcome: BatchOutcome,
) -> None:
    """Call the handlers of a run, and write what they have changed and staged.

    If this fails, `outcome` has parts of the run.
    """
    driver, outbox = attempt.driver, attempt.outbox
    earlier = outbox.staged
    try:
        await _call(items, attempt, outcome)
        if not driver.is_in_transaction():
            raise HandlerFault(HAS_ENDED)
        if outcome.returned:
            await inbox.keep_results(driver, generations, outcome.returned)
        await write_staged(attempt, outcome)
    except BaseException:
        outbox.staged = earlier
        raise


async def write_staged(attempt: Attempt, outcome: BatchOutcome) -> None:
    """Write the events and calls that are staged."""
    driver, outbox = attempt.driver, attempt.outbox
    # They are written after the aggregates are locked: so they have their order.
    await backlog.add_calls(driver, attempt.handlers, outbox.calls, attempt.encryption)
    if attempt.claims is not None:
        await attempt.claims.store(driver, outbox, attempt.reserve)
    if attempt.encryption is not None:
        await attempt.encryption.encrypt_events(driver, outbox)
    if not await outbox.write(driver) and outcome.applied and not outcome.returned:
        # If a handler has suppressed the error of a statement, COMMIT would report success and
        # change nothing. This statement fails.
        await driver.execute("SELECT")
    outcome.events += len(outbox)
    outcome.has_calls |= bool(outbox.calls)
    outbox.clear()


async def _call(items: Sequence[Item], attempt: Attempt, outcome: BatchOutcome) -> None:
    info = attempt.connection.info
    info[GUARD] = attempt.guard
    assert attempt.task is not None
    CALLS[attempt.task] = attempt.ignores_cancellation
    try:
        await call_handlers(items, attempt, outcome)
    finally:
        attempt.deadline.close()
        metrics.handled(attempt.longest)
        del CALLS[attempt.task]
        info.pop(GUARD, None)
