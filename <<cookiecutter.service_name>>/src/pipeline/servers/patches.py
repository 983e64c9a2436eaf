"""Patches of aiokafka: what changes its behaviour, or reaches below its public interface.

Each item is what aiokafka does without its patch, with the issue upstream where one is known:

1. A write to a connection that was reset raises uvloop's `RuntimeError`. It ends the task that
   fetches: the consumer receives nothing more, and reports no error. (aiokafka #1038)
2. `start` logs why a broker rejects the client, and raises that there is no broker.
3. `start` leaves its connection open if it is cancelled.
4. `stop` waits for unavailable brokers without a limit. (aiokafka #1101)
5. A client that is closed still opens connections for requests, or lets them wait without a limit.
6. A batch is unpacked without a limit. A header whose name is not UTF-8 raises an error at every
   attempt, so that nothing behind it is ever read. See `record_batches`.
7. A consumer for which no records come polls the brokers as often as any other, and does not report
   that its fetching task has ended, or that no broker answers.
8. The errors INVALID_RECORD, GROUP_MAX_SIZE_REACHED and FENCED_INSTANCE_ID are unknown: a broker
   that returns the first looks unavailable.
9. A client whose brokers have all moved never uses the bootstrap addresses again.
10. A consumer that may not join its group reports it to a call that waits for records, and waits
   for such a call before it tries again. No assigned partition, no call. (`_push_error_to_user`)
11. A consumer ends by an `AssertionError` if the first broker that answers knows no broker yet, not
    even itself, as while it starts.
12. A token that the broker rejects counts as accepted: the reason comes in an answer without an
    error (RFC 7628, section 3.2.2), and the next request fails by an empty one.
13. Two members with one `group.instance.id` replace each other at each heartbeat. One that restarts
    as leader of the group does not notice partitions that are added. See `consumer.Coordinator`.
14. A broker may wait for the replicas of one topic for as long as the client waits for the broker,
    so that the other topics of the request get no answer. See `limit_wait_for_replicas`.
15. A consumer reads on at its offset if a topic was created anew or a leader has lost records, and
    others are in their place: it asks neither for the topic's id (KIP-516) nor where its leader
    epoch ends (KIP-320). See `PartitionPosition.may_have_lost`.

`test_patches` and `test_clients` have a test for each that fails when it is no longer needed.
"""

import asyncio
import ssl
import traceback
from contextvars import ContextVar
from typing import Any

from aiokafka import AIOKafkaProducer, conn
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import (
    BrokerResponseError,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    SaslAuthenticationFailed,
    kafka_errors,
)

from pipeline.errors import describe_error

from . import peers
from .credentials import CredentialsUnavailable

rejections: ContextVar[dict[str, str]] = ContextVar("rejections")
"""Why a client can't connect to brokers, by their address. The tasks that it starts share it."""


class GroupIsFullError(BrokerResponseError):  # type: ignore[misc]  # it has no types
    """The broker's error GROUP_MAX_SIZE_REACHED."""

    errno = 81
    message = "GROUP_MAX_SIZE_REACHED"
    description = "The group has as many members as the broker allows (group.max.size)."


class FencedInstanceIdError(BrokerResponseError):  # type: ignore[misc]  # it has no types
    """The broker's error FENCED_INSTANCE_ID."""

    errno = 82
    message = "FENCED_INSTANCE_ID"
    description = "A process that joined later has the same PIPELINE_KAFKA_GROUP_INSTANCE_ID."

    def __repr__(self) -> str:  # all that aiokafka raises of it
        return f"{type(self).__name__}: {self.description}"


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # it has no types
    """The broker's error INVALID_RECORD."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker does not take this record."


for _error in (GroupIsFullError, FencedInstanceIdError, InvalidRecordError):
    kafka_errors.setdefault(_error.errno, _error)


class _BearerAuthenticator(conn.OAuthAuthenticator):  # type: ignore[misc]  # it has no types
    async def step(self, payload: bytes | None) -> Any:
        if payload:
            text = bytes(payload).decode(errors="replace")
            raise SaslAuthenticationFailed(f"the broker rejects the token: {text}")
        return await super().step(payload)


class Connection(conn.AIOKafkaConnection):  # type: ignore[misc]  # it has no types
    """A connection to a broker that raises `KafkaConnectionError` when it was reset."""

    async def connect(self) -> Any:
        found, broker = rejections.get({}), f"{self.host}:{self.port}"
        try:
            connected = await super().connect()
        except (KafkaError, OSError) as error:
            cause = error if isinstance(error, CredentialsUnavailable) else error.__cause__ or error
            if isinstance(cause, KafkaError | ssl.SSLError | CredentialsUnavailable):
                found[broker] = describe_error(cause)
            raise
        found.pop(broker, None)
        advice = "set PIPELINE_KAFKA_SECURITY_PROTOCOL to SASL_SSL or SSL"
        peers.note(self._writer.transport, f"Kafka at {broker}", advice)
        return connected

    def authenticator_oauth(self) -> Any:
        return _BearerAuthenticator(sasl_oauth_token_provider=self._sasl_oauth_token_provider)

    def send(self, *args: Any, **options: Any) -> Any:
        try:
            return super().send(*args, **options)
        except RuntimeError as error:
            self.close(reason=conn.CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"{self} was reset: {error}") from error


conn.AIOKafkaConnection = Connection


class Client(AIOKafkaClient):  # type: ignore[misc]  # it has no types
    """Client shared by producers and consumers. After `close`, pending and new requests are
    cancelled."""

    is_closed = False
    rejections: dict[str, str]
    _is_bootstrapping = False

    @property
    def reasons(self) -> str:
        """Why brokers can't be connected to, to follow what that has caused; empty if they can."""
        return "".join(f"; {broker}: {reason}" for broker, reason in self.rejections.items())

    @classmethod
    def of(cls, one: Any) -> "Client":
        """Return the client of a producer, a consumer or an admin client, patched."""
        client: Any = one.client if isinstance(one, AIOKafkaProducer) else one._client
        client.__class__ = cls
        patched: Client = client
        return patched

    async def _get_conn(self, *args: Any, **options: Any) -> Any:
        connection = None if self.is_closed else await super()._get_conn(*args, **options)
        if self.is_closed:
            if connection is not None:
                connection.close()
            raise asyncio.CancelledError
        return connection

    async def coordinator_lookup(self, *args: Any) -> Any:
        if not self.cluster.brokers():
            raise NodeNotReadyError("the brokers know of no broker yet")
        return await super().coordinator_lookup(*args)

    async def _metadata_update(self, *args: Any) -> bool:
        if await super()._metadata_update(*args):
            return True
        if self.is_closed or self._is_bootstrapping:
            return False
        # The response has brokers and no topics. Without those that are known the consumer would
        # rejoin its group, and the relay would take its topics for missing.
        known, self._is_bootstrapping = self.cluster, True

        def take_brokers(metadata: Any) -> None:
            found = ClusterMetadata()
            found.update_metadata(metadata)
            known._brokers = found._brokers or known._brokers

        known.update_metadata = take_brokers
        try:
            await self.bootstrap()
        except KafkaError:
            return False
        except BaseException as error:
            close_bootstrap_connection(error)
            raise
        finally:
            del known.update_metadata
            self._is_bootstrapping = False
        updated: bool = await super()._metadata_update(*args)
        return updated

    def force_metadata_update(self) -> asyncio.Future[bool]:
        update: asyncio.Future[bool] = super().force_metadata_update()
        if self.is_closed:
            self._md_update_fut.cancel()
        return update

    def cut_off(self) -> None:
        """Cancel all requests, without waiting for a broker to read what was written."""
        self.is_closed = True
        if self._sync_task is not None:
            self._sync_task.cancel()
        if self._md_update_fut is not None:
            self._md_update_fut.cancel()
        for connection in self._conns.values():
            if connection.connected():
                connection._writer.transport.abort()

    async def close(self) -> None:
        self.is_closed = True
        await super().close()


def close_bootstrap_connection(error: BaseException) -> None:
    """Close the connection that a `start` which failed with the error has left open."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if connection := frame.f_locals.get("bootstrap_conn"):
            connection.close()


def limit_wait_for_replicas(producer: AIOKafkaProducer, seconds: float) -> None:
    """Let brokers answer a request after so many seconds, whether replicas have its batches."""
    producer._sender._request_timeout_ms = round(1_000 * seconds)


def cancel_batches(producer: AIOKafkaProducer) -> None:
    """Cancel the batches that wait for a broker to acknowledge them."""
    accumulator = producer._message_accumulator
    for batches in accumulator._batches.values():
        accumulator._pending_batches.update(batches)  # where a batch's own callback looks for it
    for batch in accumulator._pending_batches:
        batch.future.cancel()
