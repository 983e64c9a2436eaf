"""A finding of a comparison: payloads that the reader's schema rejects."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """Payloads of the writer that the reader rejects or may reject."""

    kind: Literal["lacks", "has", "type", "value", "undecided"]
    path: str
    """Names of members, with `[]` for the items of a list; empty for the payload itself."""
    detail: str = ""

    @property
    def what(self) -> str:
        """Words for a sentence that describe the payloads, or the undecided part of a schema."""
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
