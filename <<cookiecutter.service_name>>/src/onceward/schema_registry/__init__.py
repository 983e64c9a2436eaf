"""Confluent's wire format: events in Avro, Protobuf or JSON, with schemas in a schema registry.

See `docs/schema-registry.md`.
"""

from confluent_kafka.schema_registry import Schema

from .codec import Confluent, Framing, Strategy
from .settings import RegistrySettings

__all__ = ["Confluent", "Framing", "RegistrySettings", "Schema", "Strategy"]
