"""Clients of Kafka: their connection options, and a start and stop that leave no task behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError

from pipeline.settings import Settings

from .consumer import KafkaConsumer
from .credentials import Credentials
from .patches import Client, cancel_batches, close_bootstrap_connection, rejections

_ANSWERS_WITHIN = 40.0
"""Seconds; aiokafka's own default."""
_CANCEL_SECONDS = 1.0
"""How long the tasks of a client have to end after it was cut off from the brokers."""


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
        await start(client)
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
    admin = AIOKafkaAdminClient(**options, request_timeout_ms=round(answer_within * 1_000))
    try:
        await start(admin)
        yield admin
    finally:
        await admin.close()


async def start(one: AIOKafkaProducer | AIOKafkaConsumer | AIOKafkaAdminClient) -> None:
    """Start a client. If this raises, it can be started again, and has to be stopped otherwise.

    Raises `KafkaConnectionError`, with the reason of brokers that answer and reject the client.
    """
    found: dict[str, str] = {}
    Client.of(one).rejections = found
    token = rejections.set(found)
    try:
        await one.start()
    except BaseException as error:
        close_bootstrap_connection(error)
        if found and isinstance(error, KafkaConnectionError):
            reasons = "; ".join(f"{broker}: {reason}" for broker, reason in found.items())
            raise KafkaConnectionError(f"no broker accepts the client: {reasons}") from error
        raise
    finally:
        rejections.reset(token)


async def stop(one: AIOKafkaProducer | AIOKafkaConsumer, seconds: float) -> None:
    """Stop a client; if that takes longer than `seconds`, abort its connections and requests."""
    client = Client.of(one)
    stopping = asyncio.create_task(one.stop())
    try:
        await asyncio.wait({stopping}, timeout=seconds)
    finally:
        if not stopping.done():
            client.cut_off()
            await asyncio.wait({stopping}, timeout=_CANCEL_SECONDS)
        if isinstance(one, AIOKafkaProducer):
            cancel_batches(one)
        if not stopping.done():
            await asyncio.wait({stopping}, timeout=_CANCEL_SECONDS)
            stopping.cancel()
        await client.close()
    with suppress(asyncio.CancelledError):
        await stopping
