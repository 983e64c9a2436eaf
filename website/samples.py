"""What commands print, for their page: `tests/test_samples.py` captures it and compares it."""

import re
from pathlib import Path

FILE = Path(__file__).with_name("samples.txt")
"""Lines that begin with `$ `, as typed into a shell, each followed by what was printed."""


def read() -> dict[str, str]:
    """Return what was printed by the command lines, without `$ `."""
    _, *found = re.split(r"^\$ ", FILE.read_text("utf-8"), flags=re.MULTILINE)
    lines = (one.partition("\n") for one in found)
    return {line: printed for line, _, printed in lines}


def write(samples: dict[str, str]) -> None:
    """Replace the samples that are kept."""
    FILE.write_text("".join(f"$ {line}\n{printed}" for line, printed in samples.items()), "utf-8")


def added(page: str, samples: dict[str, str]) -> str:
    """Return the page of commands with the samples at the end of their commands.

    Raises `LookupError` for a sample of a command that the page does not have.
    """
    parts = re.split(r"^(?=#+ `service )", page, flags=re.MULTILINE)
    names = [one.partition("`")[2].partition("`")[0] for one in parts]
    for line, printed in samples.items():
        of = [
            place for place, name in enumerate(names) if name and f"{line} ".startswith(f"{name} ")
        ]
        if not of:
            raise LookupError(f"website/samples.txt has a sample of {line}, which is no command")
        place = max(of, key=lambda one: len(names[one]))
        parts[place] = f"{parts[place].rstrip()}\n\n```text\n$ {line}\n{printed}```\n\n"
    return "".join(parts)
