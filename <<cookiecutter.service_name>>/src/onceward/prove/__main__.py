"""`make prove`, or `python -m onceward.prove FILE`: prove the handlers of a service."""

import asyncio
import os
import sys
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Annotated

import typer

from onceward import redaction
from onceward.settings import Settings
from onceward.testing import HarnessMisused

from . import report, run
from .proof import CanNotProve, load

_CODES = {"proved": 0, "differs": 1, "no verdict": 3}
_SHOWN = 10

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def prove(
    file: Annotated[Path, typer.Argument(help="declares the proof")],
    recording: Annotated[
        Path | None, typer.Option(help="messages, as `service topics record` writes them")
    ] = None,
    seed: Annotated[int, typer.Option(help="of all random choices")] = 1,
    shrink: Annotated[float, typer.Option(help="seconds in which a smaller run may begin")] = 60.0,
    stack: Annotated[
        Path | None,
        typer.Option(help="state of the servers of dev/stack.py, if they serve nothing else"),
    ] = None,
    output: Annotated[Path, typer.Option(help="folder of the report")] = Path("build/prove"),
) -> None:
    """Apply messages under faults and one by one, and compare what comes of them.

    The exit code is 0 if it is the same, 1 if something differs, 3 if there is no verdict.
    """
    redaction.learn(os.environ)
    output.mkdir(parents=True, exist_ok=True)
    logs = Path(mkdtemp(prefix="run-", dir=output))
    try:
        proof = load(file)
        records = proof.records(Random(seed), recording)
        if stack is None:
            asyncio.run(run.check_topics(proof.service))
        work = run.shrunk(proof, file.resolve(), records, Random(seed), logs, stack, shrink)
        result = asyncio.run(work)
    except (CanNotProve, HarnessMisused) as error:
        print(f"no verdict: {error}", file=sys.stderr)
        raise typer.Exit(_CODES["no verdict"]) from None
    found = report.described(result, Settings(), service=proof.service.name, seed=seed)
    diffs = ["\n".join(one.lines()) for one in result.differences]
    report.write(output, found, diffs)
    for text in (*result.wrong, *diffs[:_SHOWN]):
        print(redaction.redact(text), end="\n\n")
    if (more := len(diffs) - _SHOWN) > 0:
        print(f"and {more} more differences, in the report", end="\n\n")
    if result.verdict != "differs":
        print("\n".join(result.unmet), end="\n" * bool(result.unmet))
    hits = sum(one.hit for one in result.faults.values())
    applied = sum(result.applied.values())
    print(f"{result.verdict}: {result.messages:,} messages, {applied:,} applied, {hits} faults hit")
    print(f"{output}/report.html; logs are in {logs}")
    raise typer.Exit(_CODES[result.verdict])


if __name__ == "__main__":
    app()
