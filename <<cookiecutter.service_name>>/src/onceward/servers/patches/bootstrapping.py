"""`bootstrap` hides why it fails, leaves its connection open, and happens only once.

What is wrong:
1. `bootstrap` logs why a broker rejects the client, and raises that it is unable to connect.
2. If it is cancelled while it waits for an answer, the connection stays open.
3. A client whose brokers have all moved never uses the bootstrap addresses again, though a name of
   them may lead to the new brokers.

To see it: start a client with TLS for a port without; cancel `start` while the broker does not
answer; replace all brokers, and let the bootstrap address lead to the new ones.

The change: `bootstrap` notes why each broker rejects the client, raises it, and closes its
connection if it fails. A refresh of the metadata without an answer bootstraps the client again.
"""

import ssl
from functools import partial
from typing import Any
from weakref import proxy

from aiokafka import conn
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import KafkaConnectionError, KafkaError

from onceward.errors import describe_error
from onceward.servers import peers
from onceward.servers.credentials import CredentialsUnavailable
from onceward.servers.subclassing import using

from .rejected_tokens import TokenConnection
from .reset_connections import ResetConnection


class Connection(ResetConnection, TokenConnection):
    """A connection to a broker, with all patches."""


_connect = using(conn.create_conn, AIOKafkaConnection=Connection)


class BootstrappingClient(AIOKafkaClient):  # type: ignore[misc]  # it has no types
    """A client that knows why brokers reject it, and finds those that have moved."""

    is_closed = False
    _is_bootstrapping = False
    _opened: Any = None
    """The connection that `bootstrap` has opened last."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rejections: dict[str, str] = {}
        """Why brokers can't be connected to, by their address."""
        weak: Any = proxy(self)  # or each client would wait for the garbage collector
        create = partial(type(self)._create_connection, weak)
        self._bootstrap = using(AIOKafkaClient.bootstrap, create_conn=create)
        self._connection_to = using(AIOKafkaClient._get_conn, create_conn=create)

    @property
    def reasons(self) -> str:
        """Why brokers can't be connected to, to follow what that has caused; empty if they can."""
        return "".join(f"; {broker}: {reason}" for broker, reason in self.rejections.items())

    async def bootstrap(self) -> None:
        """Connect to the first broker that answers.

        Raises `KafkaConnectionError`, with the reason of brokers that answer and reject the client.
        """
        if not self._is_bootstrapping:
            self.rejections.clear()
        try:
            await self._bootstrap(self)
        except BaseException as error:
            if self._opened is not None:
                self._opened.close()
            if self.rejections and isinstance(error, KafkaConnectionError):
                reasons = self.reasons.removeprefix("; ")
                raise KafkaConnectionError(f"no broker accepts the client: {reasons}") from error
            raise
        finally:
            self._opened = None

    async def _get_conn(self, *args: Any, **options: Any) -> Any:
        return await self._connection_to(self, *args, **options)

    async def _create_connection(self, host: str, port: int, **options: Any) -> Any:
        broker = f"{host}:{port}"
        try:
            connection = await _connect(host, port, **options)
        except (KafkaError, OSError) as error:
            cause = error if isinstance(error, CredentialsUnavailable) else error.__cause__ or error
            if isinstance(cause, KafkaError | ssl.SSLError | CredentialsUnavailable):
                self.rejections[broker] = describe_error(cause)
            raise
        self.rejections.pop(broker, None)
        advice = "set PIPELINE_KAFKA_SECURITY_PROTOCOL to SASL_SSL or SSL"
        peers.note(connection._writer.transport, f"Kafka at {broker}", advice)
        if "on_close" not in options:  # the client keeps the others
            self._opened = connection
        return connection

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
        finally:
            del known.update_metadata
            self._is_bootstrapping = False
        updated: bool = await super()._metadata_update(*args)
        return updated
