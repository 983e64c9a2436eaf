"""Settings of the claim check: `PIPELINE_CLAIM_<FIELD>`, read when the service starts."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from onceward.object_store import StoreUrl
from onceward.server_settings import EnvironmentSettings
from onceward.settings import Count, Seconds


class ClaimSettings(EnvironmentSettings):
    """Where large payloads are stored, and for how long. Credentials come from the environment,
    too, under the names that the store's own tools use."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_CLAIM_", env_ignore_empty=True)

    url: StoreUrl | None = None
    """`file:///folder`, `s3://bucket/prefix`, `gs://…` or `az://…`, the same for all services that
    exchange events."""
    limit_bytes: Count = 500 * 1024
    """A larger payload, in bytes, is stored; less than `PIPELINE_MAX_EVENT_BYTES`."""
    memory_bytes: Count = 16 * 2**20
    """Most bytes of a payload, and of a batch's payloads together."""
    concurrency: Count = 8
    """Payloads that are stored at once, and as many that are fetched."""
    timeout: Seconds = 3.0
    """Time for each fetched payload, and for all that a transaction stores; at most half of
    `PIPELINE_TRANSACTION_TIMEOUT`."""
    grace: Annotated[Seconds, Field(ge=3_600)] = 2_592_000.0
    """Objects without a committed event are deleted after this long: 30 days."""
    age: Seconds = 2_592_000.0
    """Payloads are deleted this long after publication: 30 days. It must exceed the topics'
    retention and the wait of dead letters."""

    @model_validator(mode="after")
    def _a_payload_fits(self) -> Self:
        if self.limit_bytes > self.memory_bytes:
            raise ValueError(
                "PIPELINE_CLAIM_LIMIT_BYTES <= PIPELINE_CLAIM_MEMORY_BYTES must hold; they are"
                f" {self.limit_bytes} and {self.memory_bytes}"
            )
        return self
