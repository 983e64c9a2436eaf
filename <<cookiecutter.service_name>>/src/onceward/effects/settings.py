"""Settings of effects: `PIPELINE_EFFECT_<FIELD>`, read when the service starts."""

from pydantic_settings import SettingsConfigDict

from onceward.server_settings import EnvironmentSettings
from onceward.settings import Count


class EffectSettings(EnvironmentSettings):
    """How many calls are made at once."""

    model_config = SettingsConfigDict(env_prefix="PIPELINE_EFFECT_")

    calls: Count = 40
    """Concurrent calls to other services, each of another key."""
