"""The words that a reader meets, and the command `service help words`, which explains them.

They are in `words.json`, from which the operations page and `docs/glossary.md` have them, too.
"""

import json
from collections.abc import Mapping
from importlib import resources
from typing import Annotated

import typer

from .output import print_json, table, write
from .terminal import Json

_SOURCE = resources.files(__package__).joinpath("words.json").read_text("utf-8")

WORDS: Mapping[str, Mapping[str, str]] = json.loads(_SOURCE)
"""Each word with its `meaning` and an `example`; among them every heading of the page's overview.
"""

app = typer.Typer(help="Explanations. `service --help` lists the commands.", no_args_is_help=True)


@app.command("words", epilog="For example: service help words lag redrive")
def explain(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="words, or parts of them")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain the words of the commands, the log, the operations page and the documentation."""
    parts = [name.casefold() for name in names or [""]]
    found = {
        word: one for word, one in WORDS.items() if any(part in word.casefold() for part in parts)
    }
    if not found:
        raise typer.BadParameter("none of these is explained; `service help words` lists all")
    if as_json:
        print_json(*({"word": word, **one} for word, one in found.items()))
    else:
        rows = ([word, one["meaning"], one["example"]] for word, one in found.items())
        for line in table(("word", "meaning", "example"), rows):
            write(line)
