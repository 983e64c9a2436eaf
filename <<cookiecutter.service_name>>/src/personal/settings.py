"""Settings of personal data: `PIPELINE_PERSONAL_<FIELD>`, read when the service starts."""

import base64
import binascii
from collections.abc import Sequence

from pydantic import SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.settings import Count, Seconds


class PersonalSettings(BaseSettings):
    """The master keys, and how long keys stay in memory."""

    model_config = SettingsConfigDict(
        env_prefix="PIPELINE_PERSONAL_",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        env_ignore_empty=True,
    )

    keys: SecretStr | None = None
    """Master keys, each 32 random bytes in Base64 (`openssl rand -base64 32`), with commas between
    them: the first encrypts the subjects' keys, all decrypt them. Needed unless `PersonalData` is
    given `MasterKeys`. Without them nothing personal can be read: keep them in two places, and none
    in backups of the database."""
    cache: Count = 10_000
    """Decrypted keys of subjects that a process keeps in memory."""
    cache_age: Seconds = 60.0
    """How long. Longer than that nothing in a process can decrypt data of a forgotten subject; the
    engine does not from the moment of forgetting on, as it reads in the table which keys exist."""

    @field_validator("keys")
    @classmethod
    def _are_keys(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            _decoded(value)
        return value

    @property
    def master_keys(self) -> Sequence[bytes]:
        """The keys, each of 32 bytes."""
        return [] if self.keys is None else _decoded(self.keys)


def _decoded(value: SecretStr) -> list[bytes]:
    keys = []
    for text in value.get_secret_value().split(","):
        try:
            key = base64.b64decode(text.strip(), validate=True)
        except binascii.Error:
            key = b""
        if len(key) != 32:
            raise ValueError(
                "write keys of 32 bytes in Base64, as `openssl rand -base64 32` prints them,"
                " with commas between them"
            )
        keys.append(key)
    return keys
