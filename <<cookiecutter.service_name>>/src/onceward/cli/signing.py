"""Who changes something by a command, and why: the options that the audit gets."""

import getpass
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import typer

from onceward.operators.audit import Change


@dataclass(frozen=True)
class Signed:
    """Options of a command that changes something."""

    because: Annotated[str | None, typer.Option(help="reason to store")] = None
    operator: Annotated[str | None, typer.Option(help="name to store", show_default="you")] = None

    unnamed: ClassVar[str] = "unknown"
    """Name of a user without one, as in a container."""

    def to(self, action: str) -> Change:
        """Return an action with its name and reason.

        Raises `typer.BadParameter` if one of them is empty.
        """
        who = _user_name() or self.unnamed if self.operator is None else self.operator
        for name, text in (("--because", self.because), ("--operator", who)):
            if text is not None and not text.strip():
                raise typer.BadParameter(f"{name} is empty: it is stored, to be read later")
        return Change(who, action, self.because)


@dataclass(frozen=True)
class Explained(Signed):
    """Options of a command that requires a reason, and a name."""

    because: Annotated[str, typer.Option(help="reason to store")] = field()

    unnamed: ClassVar[str] = ""


def _user_name() -> str:
    """Return the name of the process's user; empty in a container whose user has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
