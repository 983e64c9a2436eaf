"""Changes of the baked service's source."""

from dataclasses import dataclass
from pathlib import Path


class Outdated(Exception):
    """The service does not hold the text that is to be replaced."""


@dataclass(frozen=True)
class Edit:
    """A text of a module, which stands there once, and what takes its place."""

    module: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        """Change the module. Raises `Outdated`."""
        path = package / self.module
        text = path.read_text()
        if text.count(self.old) != 1:
            raise Outdated(
                f"this stands {text.count(self.old)} times in {self.module}:\n{self.old}"
            )
        path.write_text(text.replace(self.old, self.new))
