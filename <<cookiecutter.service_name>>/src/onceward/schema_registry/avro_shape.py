"""What a schema of Avro allows its payloads: recursion, and values that take no bytes."""

from collections.abc import Mapping
from typing import Any


class Shape:
    """The types of one schema, each visited once."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        """`named` has the definitions of fastavro, by full names."""
        self.is_recursive = False
        """Whether a value may contain another one of its own type."""
        self._named = named
        self._records: dict[str, bool | None] = {}

    def takes_bytes(self, schema: Any) -> bool:
        """Return whether each value takes at least one byte.

        Raises `ValueError` for an array whose items may take none: 5 bytes could announce millions
        of them.
        """
        if isinstance(schema, str):
            if schema not in self._named:
                return schema != "null"
            schema = self._named[schema]
        if isinstance(schema, list):
            for branch in schema:
                self.takes_bytes(branch)
            return True
        match schema["type"]:
            case "record":
                return self._record(schema)
            case "array":
                if not self.takes_bytes(schema["items"]):
                    raise ValueError("it has an array whose items take no bytes, such as null")
                return True
            case "map":
                self.takes_bytes(schema["values"])
                return True
            case "fixed":
                return bool(schema["size"])
            case other:
                return self.takes_bytes(other)

    def _record(self, schema: Mapping[str, Any]) -> bool:
        name = schema["name"]
        if name not in self._records:
            self._records[name] = None
            fields = [self.takes_bytes(field["type"]) for field in schema["fields"]]
            self._records[name] = any(fields)
        found = self._records[name]
        if (
            found is None
        ):  # inside of itself: by way of a union, an array or a map, which have bytes
            self.is_recursive = True
            return True
        return found
