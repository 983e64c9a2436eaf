"""The receiver: applies requests as messages are applied, and answers with the handler's result.

Nothing here is HTTP: a server of another protocol, or a job, can use it as well.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from opentelemetry.context import get_current
from pydantic_core import from_json
from sqlalchemy.ext.asyncio import AsyncEngine

from onceward import Event, Handlers, Message, Park, Reject, Retry, Service
from onceward.apply.attempt import Findings
from onceward.apply.batch import validated
from onceward.apply.breaker import Breaker
from onceward.apply.failures import RolledBack
from onceward.apply.item import Item, StoredRecord
from onceward.apply.ladder import BATCH
from onceward.apply.outcome import BatchOutcome
from onceward.apply.throttles import Resting, Throttles
from onceward.apply.transactions import ConsumeTransactions, Signals
from onceward.errors import (
    UNSTORABLE,
    OncewardError,
    Repeat,
    as_raised,
    describe_error,
    is_contention,
    is_infrastructure,
    is_of_the_database,
    leaves,
    sqlstate_of,
)
from onceward.events.event import Unpublishable, payload_of
from onceward.events.message import marker_key
from onceward.events.payload import payload_hash
from onceward.handlers.policy import MOST_LOSSES
from onceward.handlers.registry import Handler
from onceward.handlers.staging import REQUESTS
from onceward.observe import metrics
from onceward.observe.health import Health
from onceward.observe.traces import creation_context
from onceward.servers.guard import HandlerFault
from onceward.servers.retrying import Retrying, pause
from onceward.settings import Settings, WriterSettings

from .source import InvalidKey, KeyReused, RequestSource

log = logging.getLogger(__name__)

_OF_VALUES = ("22", "23", "44", "54", "P0001")
"""Errors of PostgreSQL that the values of a request cause: data exceptions, violated constraints
and check options, limits such as that of an index, and what a trigger raises."""
_PAUSED_SECONDS = 5.0
"""After which a request of a paused consumer is to be repeated, and of a throttled one at most."""
_NOT_ACCEPTED = (
    "the database does not accept a value of the request, such as a text that is too long or a time"
    " that is out of range; nothing was stored, and a repeat is rejected as well: send other values"
)


class Unavailable(OncewardError):
    """The request could not be applied now: repeat it, with the same key.

    It was not applied, unless only the result of its COMMIT was lost: a repeat then gets the stored
    answer.
    """

    def __init__(self, reason: str, *, after: float | None = None) -> None:
        super().__init__(f"the request could not be applied: {reason}; repeat it with its key")
        self.after = 1.0 if after is None else after
        """Seconds after which to repeat it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a handler for a request."""

    answer: Any
    """What the handler returned, as JSON has it."""
    is_repeat: bool
    """Whether it was stored before: by an earlier request with this key, or by an attempt at this
    one whose COMMIT was not confirmed."""


@asynccontextmanager
async def open_receiver(
    service: Service, settings: Settings | None = None
) -> AsyncIterator["Receiver"]:
    """Yield a receiver of requests for a service, with a connection pool of its own.

    By default the settings are read from the environment. It needs the database, and no Kafka.
    While the codec of a topic can't be opened, events for this topic raise `StoreUnavailable`.
    Create one for each process. It opens the service's resources, and waits until they are open.
    Raises `Misconfigured` for events that can't be published.
    """
    settings = settings or WriterSettings()
    async with service.opened() as opened, opened.publishing(settings) as engine:
        yield Receiver(opened, engine, settings, Throttles(engine))


class Receiver(ConsumeTransactions):
    """Applies requests, each in its own transaction, `PIPELINE_CONCURRENCY` of them at once."""

    def __init__(
        self,
        service: Service,
        engine: AsyncEngine,
        settings: Settings,
        throttles: Throttles | None = None,
    ) -> None:
        """See `open_receiver`, which makes one."""
        super().__init__(
            engine,
            group=service.name,
            source=service.source,
            settings=settings,
            # It never opens: all requests of a consumer have one order key.
            breaker=Breaker(keys=2, pause=0, health=Health(stall_after=0), throttles=throttles),
            # One key is looked up at once in all generations.
            handlers=service.handlers,
            signals=Signals(),
            claims=service.claims and service.claims(service.name, settings),
            encryption=service.encryption,
        )
        self._requests = f"{service.source}/requests"

    async def receive(
        self,
        event: Event,
        *,
        key: str,
        consumer: str,
        scope: str = "",
        seconds: float = 10.0,
        sent: bytes | None = None,
    ) -> Answer:
        """Apply an event by a consumer's handler, once for each key; return the handler's result.

        The handler is that of the consumer for the event's class: it gets the event and a
        `Transaction`, with all that belongs to it, and its result is stored with the key's marker.
        A repeat gets that result, for as long as the inbox remembers (`PIPELINE_INBOX_AGE`); after
        that the same key is a new request. `scope` separates the keys of different callers.

        A repeat is equal if `sent` is: what the caller has sent, whatever this release makes of it.
        Without it the events are compared, except for fields that have their defaults. Make the
        event of nothing but the request then: a time or a number that is new in each call would
        make it another event.

        Raises `KeyReused` if the key has come with another event, `UnderWay` while another call
        with it is applied, and `Unavailable` if the consumer is paused, or has taken as many as it
        is throttled to, if servers fail, or the handler takes too long or raises `Retry` or `Park`,
        and after `seconds` in any case. Raises `Reject` for values that the database does not
        accept, and for an event that can't be written as JSON. Other errors of the handler, such as
        its own `Reject`, are raised as they are. None of these stores anything. Raises `TypeError`
        if no handler of the consumer takes the event, and `InvalidKey` for a key or scope that
        can't be stored.
        """
        source = self._source_of(event, key, consumer, scope, sent)
        reasons = [f"it has taken longer than {seconds:g} s"]
        retrying = Retrying("a request", self.settings.postgresql, report=reasons.append)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                outcome = await self._receive(source, retrying)
        except Resting:
            left = self.throttles.left("consumer", consumer)
            why = "paused" if left == math.inf else "throttled"
            raise Unavailable(f"{consumer} is {why}", after=min(left, _PAUSED_SECONDS)) from None
        except KeyReused as error:
            metrics.processed(REQUESTS, consumer, "identity mismatch", 1, self.group)
            log.warning("%s: %s", source.item.name, error)
            raise
        except Exception as error:
            # SQLAlchemy replaces a cancellation in its first connection by another error.
            if not limit.expired():
                raise
            raise Unavailable(reasons[-1]) from error
        result = source.answer or outcome.returned.get(source.item.key)
        return Answer(None if result is None else from_json(result), bool(outcome.duplicates))

    async def _receive(self, source: RequestSource, retrying: Retrying) -> BatchOutcome:
        """Apply the request. Raises what its handler has raised, or `Unavailable`."""
        findings, attempts, losses, is_repeated = Findings(), 0, 0, False
        while True:
            result = await retrying(self.transact, source, BATCH, findings)
            match result:
                case BatchOutcome():
                    return result
                case Repeat():
                    pass
                case RolledBack(error=error) if is_contention(error) or (
                    result.is_lost and losses < MOST_LOSSES - 1
                ):
                    losses += result.is_lost
                    await asyncio.sleep(pause(attempts))
                case RolledBack() if await self._was_outage(result, retrying):
                    pass
                case RolledBack(error=error) if is_of_the_database(error) and not (
                    is_repeated or result.is_lost
                ):
                    is_repeated = True  # another may have inserted the same row meanwhile
                case RolledBack(error=Retry() | Park() as error):
                    raise Unavailable(str(error), after=error.after) from error
                case RolledBack(error=error) if is_infrastructure(error):
                    raise Unavailable(describe_error(error)) from error
                case RolledBack(error=error) if _is_of_values(error):
                    name, why = source.item.name, describe_error(error)
                    log.warning("%s: the database does not accept the request: %s", name, why)
                    raise Reject(_NOT_ACCEPTED) from error
                case RolledBack(error=Exception() as error):
                    raise error
                case RolledBack(error=error):
                    raise HandlerFault(describe_error(error)) from error  # of sys.exit()
            attempts += 1

    def _source_of(
        self, event: Event, key: str, consumer: str, scope: str, sent: bytes | None
    ) -> RequestSource:
        handler = _handler(self.handlers, type(event), consumer)
        if not key or UNSTORABLE.search(key + scope):
            raise InvalidKey(f"the key of a request is text without NUL, not {key!r} of {scope!r}")
        source = f"{self._requests}/{scope}" if scope else self._requests
        try:
            data = payload_of(event)
        except Unpublishable as error:
            raise Reject(str(error)) from error
        defaults = _defaults(event)
        event_hash = identity = _hash(event, defaults)
        if sent is not None:
            identity = payload_hash("request", None, sent)
        elif more := type(event).model_fields.keys() - event.model_fields_set - defaults:
            identity = _hash(event, defaults | more)  # without those of a default_factory
        now = datetime.now(UTC)
        traceparent, tracestate, baggage = creation_context()
        milliseconds = int(now.timestamp() * 1_000)
        message = Message(
            topic=REQUESTS,
            partition=0,
            offset=0,
            timestamp=milliseconds,
            key=None,
            source=source,
            id=key,
            type=event.__event_type__,
            time=now,
            subject=None,
            sequence=None,
            dataschema=None,
            content_type="application/json",
            data=data,
            traceparent=traceparent,
            tracestate=tracestate,
            baggage=baggage,
            hash=identity,
        )
        record = StoredRecord(REQUESTS, 0, 0, milliseconds, None, data, (), 0.0)
        made = validated(Item(handler, marker_key(consumer, source, key), message, record))
        if made.fault is not None:
            raise made.fault
        # In the trace of the request, without a span of its own.
        item = made._replace(was_young=True, called=get_current())
        return RequestSource(item, event_hash, self.throttles)


def _is_of_values(error: BaseException) -> bool:
    """Whether PostgreSQL, or its driver, does not accept values, so that a repeat fails as well."""
    return is_of_the_database(error) and all(
        isinstance(one, ValueError) or (sqlstate_of(one) or "").startswith(_OF_VALUES)
        for one in map(as_raised, leaves(error))
    )


def _hash(event: Event, exclude: set[str]) -> bytes:
    given = event.model_dump_json(exclude=exclude).encode()
    return payload_hash(event.__event_type__, "application/json", given)


def _defaults(event: Event) -> set[str]:
    """Return the fields that have their defaults: the hash leaves them out, so that a release that
    adds one does not make a repeat another request.

    Those of nested models stay: two members of a union may differ by a default alone.
    """
    fields = type(event).model_fields.items()
    values = ((name, getattr(event, name), field.default) for name, field in fields)
    return {
        name for name, value, default in values if (type(value), value) == (type(default), default)
    }


def _handler(handlers: Handlers, event: type[Event], consumer: str) -> Handler:
    """Return a consumer's handler of an event: of several, the one that is for requests alone."""
    found = [one for one in handlers if (one.event, one.consumer) == (event, consumer)]
    found.sort(key=lambda one: one.topic != REQUESTS)
    if not found or found[0].mode != "immediate" or found[0].gaps or found[0].takes_batches:
        raise TypeError(
            f"no handler of {consumer!r} answers requests with {event.__name__}: register one by"
            f" @handlers.on({event.__name__}, topic=None, consumer={consumer!r}). Those with mode="
            " or gaps=, and those of on_batch and of effects, answer none"
        )
    return found[0]
