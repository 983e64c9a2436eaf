"""A finding: payloads that the reader of a schema refuses."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """Payloads of the writer that the reader refuses, or that may be refused."""

    kind: Literal["lacks", "has", "type", "value", "undecided"]
    path: str
    """Names of members, with `[]` for the items of a list; empty for the payload itself."""
    detail: str = ""

    @property
    def what(self) -> str:
        """The part of a sentence that describes the payloads, or what cannot be decided."""
        name = f"`{self.path}`" if self.path else "payload"
        match self.kind:
            case "lacks":
                return f"without {name}"
            case "has" if self.path == "*" or self.path.endswith(".*"):
                of = f" of `{self.path[:-2]}`" if len(self.path) > 1 else ""
                return f"with members{of} that its schema does not name"
            case "has":
                return f"with {name}"
            case "undecided":
                return f"{name} ({self.detail})"
            case _:
                return f"whose {name} is {self.detail}"
