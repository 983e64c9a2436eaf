"""Clients of Kafka, and their connection options: none leaves a task behind when it stops.

If `start` raises an error it can be called again, and `stop` has to be called otherwise.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from onceward.settings import Settings

from .consumer import KafkaConsumer
from .credentials import Credentials
from .patches import Client, cancel_batches, stop_within
from .subclassing import using

_ANSWERS_WITHIN = 40.0
"""Seconds; aiokafka's own default."""

_init_producer = using(AIOKafkaProducer.__init__, AIOKafkaClient=Client)
_init_admin = using(AIOKafkaAdminClient.__init__, AIOKafkaClient=Client)


class KafkaProducer(AIOKafkaProducer):  # type: ignore[misc]  # it has no types
    """aiokafka's producer with the patches."""

    def __init__(self, **options: Any) -> None:
        _init_producer(self, **options)

    async def stop(self, seconds: float | None = None) -> None:
        """Send what is left and stop; after `seconds` abort it. None: no limit."""
        await stop_within(seconds, super().stop(), self.client, partial(cancel_batches, self))


class _Admin(AIOKafkaAdminClient):  # type: ignore[misc]  # it has no types
    def __init__(self, **options: Any) -> None:
        _init_admin(self, **options)


def connection_options(settings: Settings) -> dict[str, Any]:
    """Return the options of every client: the brokers' addresses, TLS and credentials."""
    password, function = settings.kafka_password, settings.kafka_token_provider
    return {
        "bootstrap_servers": settings.kafka_bootstrap_servers,
        "security_protocol": settings.kafka_security_protocol,
        "ssl_context": settings.kafka_context(),
        "sasl_mechanism": settings.kafka_sasl_mechanism,
        "sasl_plain_username": settings.kafka_user,
        "sasl_plain_password": password.get_secret_value() if password else None,
        "sasl_oauth_token_provider": function
        and Credentials("PIPELINE_KAFKA_TOKEN_PROVIDER", function, settings.kafka_token_extensions),
    }


@asynccontextmanager
async def offsets_client(
    settings: Settings, group: str | None = None
) -> AsyncIterator[KafkaConsumer]:
    """Yield a consumer for queries of offsets, and of what a group has committed.

    It is no member of a group. Raises `KafkaError`.
    """
    options = connection_options(settings)
    client = KafkaConsumer(**options, group_id=group, enable_auto_commit=False)
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


@asynccontextmanager
async def admin_client(
    settings: Settings, *, answer_within: float = _ANSWERS_WITHIN
) -> AsyncIterator[AIOKafkaAdminClient]:
    """Yield a client that describes topics and groups, and creates topics.

    `answer_within` is the limit of each request, in seconds. Raises `KafkaError`.
    """
    options = connection_options(settings)
    admin = _Admin(**options, request_timeout_ms=round(answer_within * 1_000))
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()
