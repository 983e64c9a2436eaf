"""Settings of effects: `PIPELINE_EFFECT_<FIELD>`, read when the service starts."""

from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.settings import Count


class EffectSettings(BaseSettings):
    """How many calls are made at once."""

    model_config = SettingsConfigDict(
        env_prefix="PIPELINE_EFFECT_",
        frozen=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    calls: Count = 40
    """Concurrent calls to other services, each of another key."""
