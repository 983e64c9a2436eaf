"""Settings of personal data: `PIPELINE_PERSONAL_<FIELD>`, read when the service starts."""

import base64
import binascii
from collections.abc import Sequence

from pydantic import SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from onceward.server_settings import EnvironmentSettings
from onceward.settings import Count, Seconds


class PersonalSettings(EnvironmentSettings):
    """The master keys, and how long keys stay in memory."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_PERSONAL_", env_ignore_empty=True)

    keys: SecretStr | None = None
    """Master keys, 32 random bytes in Base64 each (`openssl rand -base64 32`), separated by commas.
    The first encrypts the subjects' keys, all decrypt them."""
    cache: Count = 10_000
    """Decrypted keys that a process keeps in memory."""
    cache_age: Seconds = 60.0
    """Time for which it keeps them; a deleted key is not used any more."""

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
