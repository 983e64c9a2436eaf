"""Settings of the claim check: `PIPELINE_CLAIM_<FIELD>`, read when the service starts."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.server_settings import written
from pipeline.settings import Count, Seconds


class ClaimSettings(BaseSettings):
    """Where large payloads are kept, and for how long. Credentials come from the environment too,
    under the names that the store's own tools use."""

    model_config = SettingsConfigDict(
        env_prefix="PIPELINE_CLAIM_",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    url: (
        Annotated[
            str,
            written(
                r"(file:///|(s3|gs|az)://[^/?#@]+)[^?#%@]*",
                "file:///folder, s3://bucket/prefix, gs://… or az://…",
            ),
        ]
        | None
    ) = None
    """`file:///folder`, `s3://bucket/prefix`, `gs://…` or `az://…`, the same for all services that
    take each other's events; each keeps its own below its name. Unset: payloads travel with their
    events, whatever their size."""
    limit: Count = 500 * 1024
    """A payload of more bytes is kept in the store; less than `PIPELINE_MAX_EVENT_BYTES`."""
    memory: Count = 16 * 2**20
    """Bytes of the largest payload that is kept or fetched, and of those of a batch together. A
    process holds two batches of each partition."""
    concurrency: Count = 8
    """Payloads that the process stores at once, and as many that it fetches."""
    timeout: Seconds = 3.0
    """The store has this long for each payload that is fetched, and for all that a transaction
    stores; half of `PIPELINE_TRANSACTION_TIMEOUT` at most."""
    grace: Annotated[Seconds, Field(ge=3_600)] = 2_592_000.0
    """What is in the store for so long without an event that was committed is deleted: 30 days. It
    costs only space, and after a restore or a failover events may have been sent that the database
    does not know any more."""
    age: Seconds = 2_592_000.0
    """Payloads are deleted this long after their events were published: 30 days. Longer than topics
    keep their records, and than a dead letter lies until somebody redrives it."""

    @model_validator(mode="after")
    def _a_payload_fits(self) -> Self:
        if self.limit > self.memory:
            raise ValueError(
                "PIPELINE_CLAIM_LIMIT <= PIPELINE_CLAIM_MEMORY must hold; they are"
                f" {self.limit} and {self.memory}"
            )
        return self
