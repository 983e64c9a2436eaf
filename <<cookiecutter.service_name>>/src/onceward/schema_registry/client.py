"""The schema registry's client, and its errors: what is unavailable, and what is unknown."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TypeVar
from urllib.parse import quote
from uuid import UUID

import httpx2
from confluent_kafka.schema_registry import (
    AsyncSchemaRegistryClient,
    RegisteredSchema,
    Schema,
)
from confluent_kafka.schema_registry.error import OAuthTokenError, SchemaRegistryError
from pydantic import ValidationError

from onceward.errors import OncewardError, StoreUnavailable, describe_error
from onceward.service import Misconfigured
from onceward.settings import mistakes

from .framing import SchemaKey
from .settings import RegistrySettings

T = TypeVar("T")
Call = Callable[[AsyncSchemaRegistryClient], Awaitable[T]]

_NOT_FOUND = (40401, 40402, 40403)
"""Codes of the registry's API: it has no such subject, version or schema."""


_LARGEST_ID = 2**31 - 1
"""Ids are numbers of Java; a registry may fail with larger ones, as if it were unavailable."""
_TEMPORARY = (408, 429)
_NO_REGISTRY = "what it answers is not of its API"


class Unknown(OncewardError):
    """The registry does not have what was requested."""


class Incomplete(OncewardError):
    """The registry does not have what a schema refers to."""


class Session:
    """Requests to the registry."""

    def __init__(
        self, client: AsyncSchemaRegistryClient, settings: RegistrySettings, gate: asyncio.Semaphore
    ) -> None:
        self._client = client
        self._settings = settings
        self._gate = gate

    async def schema(self, key: SchemaKey) -> tuple[Schema, Mapping[str, Schema]]:
        """Return a schema and those that it refers to, by the names that it has for them.

        Raises `Unknown`, `Incomplete` and `StoreUnavailable`.
        """
        if isinstance(key, int) and key > _LARGEST_ID:
            raise Unknown
        if isinstance(key, UUID):
            schema = await self._ask(lambda client: client.get_schema_by_guid(str(key)))
        else:
            schema = await self._ask(lambda client: client.get_schema(key))
        return self._whole(schema), await self.references(schema)

    async def references(self, schema: Schema) -> Mapping[str, Schema]:
        """Return what a schema refers to, at any depth, each behind those that it refers to.

        Raises `Incomplete` and `StoreUnavailable`.
        """
        found: dict[str, Schema] = {}

        async def collect(schema: Schema, above: frozenset[str]) -> None:
            for one in schema.references or ():
                name, subject, version = one.name, one.subject, one.version
                if name in found or name in above or not (name and subject and version):
                    continue
                try:
                    part = self._whole((await self._version(subject, version)).schema)
                except Unknown:
                    raise Incomplete(
                        f"it refers to version {version} of the subject {subject!r}, which the"
                        " registry does not have"
                    ) from None
                await collect(part, above | {name})
                found[name] = part

        await collect(schema, frozenset())
        return found

    async def _version(self, subject: str, version: int) -> RegisteredSchema:
        return await self._ask(lambda client: client.get_version(subject, version, deleted=True))

    async def latest(self, subject: str) -> RegisteredSchema:
        """Return the latest schema of a subject. Raises `Unknown` and `StoreUnavailable`."""
        registered = await self._ask(lambda client: client.get_latest_version(subject))
        self._whole(registered.schema)
        return registered

    def _whole(self, schema: Schema) -> Schema:
        """Return a schema that has a text. Raises `StoreUnavailable`: no registry has others."""
        if not schema.schema_str:
            raise self._unavailable(f"{_NO_REGISTRY} (a schema without text)")
        return schema

    async def registered(self, subject: str, schema: Schema) -> RegisteredSchema:
        """Return the version of a subject that is this schema, registered if settings allow it.

        Raises `Unknown` and `StoreUnavailable`.
        """
        if self._settings.auto_register:
            await self._ask(lambda client: client.register_schema(subject, schema))
        return await self.lookup(subject, schema)

    async def lookup(self, subject: str, schema: Schema) -> RegisteredSchema:
        """Return the version of a subject that is this schema. Raises as `registered` does."""
        return await self._ask(lambda client: client.lookup_schema(subject, schema))

    async def compared(self, subject: str, schema: Schema) -> tuple[str, str | None]:
        """Return a subject's level, and why it forbids a schema. Raises as `registered` does."""

        async def compare(client: AsyncSchemaRegistryClient) -> str | None:
            # The client's own method does not return the reasons.
            answer = await client._rest_client.post(f"{path}?verbose=true", body=schema.to_dict())
            if answer["is_compatible"]:
                return None
            reasons = answer.get("messages") or [answer.get("reason")]  # Confluent; Apicurio
            return "; ".join(str(one) for one in reasons if one) or "the registry gives no reason"

        applied = level = ""
        with suppress(Unknown):
            applied = level = await self._ask(lambda client: client.get_compatibility(subject))
        if level in ("", "NONE"):  # Apicurio: NONE also where its global level applies
            applied = await self._ask(lambda client: client.get_compatibility())
        # At any level Apicurio compares with all versions if none is named.
        version = "" if applied.endswith("_TRANSITIVE") else "/latest"
        path = f"compatibility/subjects/{quote(subject, safe='')}/versions{version}"
        return level or applied, await self._ask(compare)

    async def _ask(self, call: Call[T]) -> T:
        async with self._gate:
            try:
                # Each URL has its time, of which the client takes care as long as data flows.
                async with asyncio.timeout(self._settings.timeout * self._settings.urls):
                    return await call(self._client)
            except SchemaRegistryError as error:
                if error.error_code in _NOT_FOUND:
                    raise Unknown from None
                status, text = error.http_status_code, f"it answers {error.http_status_code}"
                if status in (401, 403):
                    text += ": check PIPELINE_SCHEMA_REGISTRY_USER and its password, or the token"
                elif 400 <= status < 500 and status not in _TEMPORARY and await self._is_there():
                    # A request that it rejects, or a registry that has no ids of this kind.
                    raise Unknown(f"the registry rejects it: {error.error_message}") from None
                raise self._unavailable(text) from None
            except (httpx2.HTTPError, OAuthTokenError, OSError) as error:
                raise self._unavailable(describe_error(error)) from error
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                text = f"{_NO_REGISTRY} ({type(error).__name__})"
                raise self._unavailable(text) from error

    async def _is_there(self) -> bool:
        """Return whether the URL leads to a registry, which answers other requests."""
        try:
            async with asyncio.timeout(self._settings.timeout):
                return bool(await self._client.get_schema_types())
        except (SchemaRegistryError, httpx2.HTTPError, OSError, TypeError, ValueError):
            return False

    def _unavailable(self, text: str) -> StoreUnavailable:
        url = self._settings.url
        return StoreUnavailable(f"schema registry {url} (PIPELINE_SCHEMA_REGISTRY_URL): {text}")


class Registry:
    """A schema registry, with a limited number of requests at once."""

    def __init__(self, settings: RegistrySettings) -> None:
        self.settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gate = asyncio.Semaphore(settings.concurrency)
        self._client: AsyncSchemaRegistryClient | None = None

    @classmethod
    def of_environment(cls) -> "Registry":
        """Return the registry that the environment names. Raises `Misconfigured`."""
        try:
            settings = RegistrySettings()
        except ValidationError as error:
            raise Misconfigured("; ".join(mistakes(error, RegistrySettings))) from None
        if settings.url is None:
            raise Misconfigured(
                "PIPELINE_SCHEMA_REGISTRY_URL is not set, and topics are declared with the codec"
                " Confluent: set it to the registry of their producers"
            )
        return cls(settings)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Provide for a number of requests.

        The client is kept, since it reads all certificates of authorities, until a request fails:
        files may have changed. Its connections and what it caches are not. Raises `Misconfigured`.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._gate = loop, asyncio.Semaphore(self.settings.concurrency)
            self._client = None
        client = self._client
        if client is None:
            client = self._client = self._created()
        await client.clear_caches()  # type: ignore[no-untyped-call]
        try:
            yield Session(client, self.settings, self._gate)
        except StoreUnavailable:
            if self._client is client:
                self._client = None
            raise

    def _created(self) -> AsyncSchemaRegistryClient:
        try:
            client = AsyncSchemaRegistryClient(self.settings.client_options())
        except (OSError, ValueError) as error:
            raise Misconfigured(f"PIPELINE_SCHEMA_REGISTRY_…: {describe_error(error)}") from None
        # The requests are few: without open connections there is nothing to close.
        client._rest_client.session.headers["connection"] = "close"
        return client
