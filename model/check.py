"""Run the models: as they are they must keep every promise, and with each fault break one.

`python -m model.check` searches in full bounds, `--quick` in those of `make test-full`. What Spin
makes, and a readable counter-example of each fault, is kept in `build/model`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MODELS = Path(__file__).resolve().parent
BUILD = MODELS.parent / "build" / "model"

INSTALL_HINT = """\
  Debian, Ubuntu:  sudo apt-get install spin gcc libc6-dev
  macOS:           brew install spin"""

MEMORY_MB = 3000
DEPTH = 10_000
COLUMNS = "{:<8} {:<30} {:<36} {:>10}  {}"


class CheckError(Exception):
    """The models could not be searched; the message says why and what to do."""


@dataclass(frozen=True)
class Run:
    """One exhaustive search."""

    model: str
    bounds: str = ""
    """Constants of the model that differ from its defaults."""
    fault: str = ""
    breaks: str = ""
    """The promise of `common.pml` that the fault breaks, `DEADLOCK` or `LIVELOCK`."""
    is_for_cycles: bool = False
    """Look for runs that never end, in place of broken promises."""

    def __str__(self) -> str:
        kind = self.fault or ("ends" if self.is_for_cycles else "kept")
        return "-".join([self.model, kind, *self.breaks.split(), *self.bounds.split()]).lower()

    @property
    def title(self) -> str:
        """What is searched, for the table."""
        if self.fault:
            return self.fault.lower().replace("_", " ")
        return "every run ends" if self.is_for_cycles else "every promise is kept"

    @property
    def definitions(self) -> list[str]:
        """Arguments for Spin's preprocessor."""
        promise = f"BREAKS={self.breaks}" if self.breaks in PROMISES else ""
        return [f"-D{it}" for it in [*self.bounds.split(), self.fault, promise] if it]


@dataclass(frozen=True)
class Outcome:
    """What a search has found."""

    run: Run
    states: int
    depth: int
    found: str
    """What Spin calls the error, or nothing."""
    gap: str
    """Why the search proves nothing, or nothing."""

    @property
    def is_as_expected(self) -> bool:
        """Whether the models keep what they must, and break what they should."""
        if self.gap:
            return False
        expected = ERRORS.get(self.run.breaks, BROKEN_PROMISE) if self.run.fault else "$"
        return re.match(expected, self.found) is not None

    @property
    def result(self) -> str:
        """The verdict in a few words."""
        if self.gap:
            return f"FAILED: {self.gap}"
        if not self.is_as_expected:
            return f"FAILED: {self.found or 'nothing was found'}"
        return f"{self.run.breaks}, {self.depth} steps" if self.run.fault else "yes"


PROMISES = ("NO_LOSS", "NO_DOUBLE", "IN_ORDER", "FENCED", "NO_ORPHAN", "NOT_BLAMED", "PAUSED")
BROKEN_PROMISE = r"assertion violated \(\((\d)!=\1\)"  # the one that was asked for by BREAKS
ERRORS = {"DEADLOCK": "invalid end state", "LIVELOCK": "non-progress cycle"}

QUICK = (
    Run("consume"),
    Run("consume", "TOGETHER=2 LENGTH=2"),
    Run("consume", "LENGTH=2", is_for_cycles=True),
    Run("ladder"),
    Run("ladder", is_for_cycles=True),
    Run("relay", "MISHAPS=1"),
    Run("relay", "MISHAPS=0", is_for_cycles=True),
    Run("backlog", "MISHAPS=0"),
    Run("backlog", "MISHAPS=0 DECISIONS=0 PAUSES=1"),
    Run("backlog", "MISHAPS=0 DECISIONS=0", is_for_cycles=True),
)
FULL = (
    Run("ladder"),
    Run("ladder", is_for_cycles=True),
    Run("relay"),
    Run("relay", "ROWS=4 MISHAPS=1"),
    Run("relay", "MISHAPS=1", is_for_cycles=True),
    Run("consume", "GENERATIONS=3"),
    Run("consume", "MISHAPS=2"),
    Run("consume", "TOGETHER=2"),
    Run("consume", is_for_cycles=True),
    Run("consume", "TOGETHER=2 LENGTH=2", is_for_cycles=True),
    Run("backlog"),
    Run("backlog", "FAILURES=2 MISHAPS=0"),
    Run("backlog", "FAILURES=2 BATCH=1 DECISIONS=0"),
    Run("backlog", "FAILURES=2 MISHAPS=0 ASIDE=2"),
    Run("backlog", "FAILURES=2 MISHAPS=0 LAST_EVENT=0"),
    Run("backlog", "MISHAPS=0 SEEKS=1"),
    Run("backlog", "MISHAPS=0 PAUSES=2"),
    Run("backlog", "DECISIONS=0 PAUSES=1"),
    Run("backlog", "MISHAPS=0", is_for_cycles=True),
    Run("backlog", "MISHAPS=0 DECISIONS=0 PAUSES=2", is_for_cycles=True),
)
# The comments: what the counter-example shows, and the trap of tests/onceward/unit/test_traps.py.
FAULTS = (
    # The position moves in its own transaction; the next record commits before this one takes
    # effect. Trap 13.
    Run("consume", "", "POSITION_FIRST", "NO_LOSS"),
    # As above, and then this record takes effect. Trap 13.
    Run("consume", "", "POSITION_FIRST", "IN_ORDER"),
    # An event and its duplicate in the other partition are both passed without an effect.
    Run("consume", "", "MARKER_IN_ITS_OWN_TRANSACTION", "NO_LOSS"),
    # A zombie commits a batch behind the position. Trap 12.
    Run("consume", "", "NO_COMPARE_AND_SET", "FENCED"),
    # As above, after the generation of its markers was forgotten. Traps 10 and 12.
    Run("consume", "", "NO_COMPARE_AND_SET", "NO_DOUBLE"),
    # COMMIT's answer is lost; the position is not read again, and the batch repeats forever.
    # Trap 19.
    Run("consume", "", "NO_SECOND_LOOK", "LIVELOCK", is_for_cycles=True),
    # The snapshot is older than the lock: the marker goes into a closed generation.
    Run("consume", "", "LOCK_AND_READ_IN_ONE", "NO_DOUBLE"),
    # A generation is closed while a transaction inserts a marker.
    Run("consume", "", "ROTATION_WITHOUT_LOCK", "NO_DOUBLE"),
    # The same event before and after a rotation. Trap 9.
    Run("consume", "", "NO_LOOK_UP", "NO_DOUBLE"),
    # Two partitions look up one event simultaneously. Trap 31.
    Run("consume", "", "MARKERS_WITHOUT_UNIQUE_KEY", "NO_DOUBLE"),
    # Two batches wait for each other's markers. Trap 11.
    Run("consume", "MISHAPS=0", "MARKERS_UNSORTED", "DEADLOCK"),
    # Two processes with the same partitions wait for each other's positions.
    Run("consume", "TOGETHER=2 LENGTH=2 MISHAPS=0", "POSITIONS_UNSORTED", "DEADLOCK"),
    # A call has failed and is undone in memory, but its changes are written with the others'.
    Run("ladder", "", "UNDO_KEEPS_CHANGES", "NO_DOUBLE"),
    # A transaction was rolled back, and its first message spends an attempt.
    Run("ladder", "", "BLAMED_WHEN_ROLLED_BACK", "NOT_BLAMED"),
    # An outage ends the connection of a message that is tried alone.
    Run("ladder", "", "A_LOSS_IS_A_FAILURE", "NOT_BLAMED"),
    # A message ends each connection, and the process that counts does not last.
    Run("ladder", "", "LOSSES_IN_MEMORY", "LIVELOCK", is_for_cycles=True),
    # A message whose COMMIT fails stays beside its neighbours.
    Run("ladder", "", "SAME_RUNG_AGAIN", "LIVELOCK", is_for_cycles=True),
    # A message whose COMMIT fails is called on the lowest rung, too.
    Run("ladder", "", "LOWEST_RUNG_CALLS", "LIVELOCK", is_for_cycles=True),
    # A later message of the key takes effect while the one before it is stored.
    Run("ladder", "", "FOLLOWERS_GO_ON", "IN_ORDER"),
    # Row 2 is published, then row 1 commits. Trap 1.
    Run("relay", "PAGE=3 MISHAPS=0", "CURSOR_ON_ID", "NO_LOSS"),
    # The key's second transaction has the lower xid, and a running one lies between. Trap 2.
    Run("relay", "PAGE=3 MISHAPS=0", "CURSOR_ON_OLDEST_RUNNING", "IN_ORDER"),
    # The lower xid got the lock second. Trap 3.
    Run("relay", "PAGE=3 MISHAPS=0", "ORDER_BY_XID", "IN_ORDER"),
    # A transaction above xmax had inserted its row; the next window begins after that id.
    # Trap 27.
    Run("relay", "PAGE=3 MISHAPS=0", "BOUNDED_BY_ID", "NO_LOSS"),
    # `seen` is only an xmax, as on a standby: running transactions count as published. Trap 30.
    Run("relay", "MISHAPS=0", "NO_RUNNING_LIST", "NO_LOSS"),
    # A transaction reads the window, then inserts: its snapshot does not list itself.
    # Trap 30.
    Run("relay", "MISHAPS=0", "SNAPSHOT_OF_A_WRITER", "NO_LOSS"),
    # PAGE reads what is visible now; rows that appeared behind `last_id` count as published.
    Run("relay", "MISHAPS=0 ROWS=4 PAGE=1", "PAGE_PAST_ITS_TARGET", "NO_LOSS"),
    # Ids are assigned before the aggregate's lock. Traps 3 and 28.
    Run("relay", "MISHAPS=0", "LOCK_AFTER_INSERT", "IN_ORDER"),
    # The cursor passes an event that never landed. Trap 6.
    Run("relay", "MISHAPS=1", "PAST_A_FAILED_SEND", "NO_LOSS"),
    # The key's next event lands first. Trap 6.
    Run("relay", "MISHAPS=1", "PAST_A_FAILED_SEND", "IN_ORDER"),
    # A paused relay overwrites its successor's progress. Trap 5.
    Run("relay", "MISHAPS=2", "NO_TOKEN", "FENCED"),
    # A paused relay sends its whole page beside its successor.
    Run("relay", "MISHAPS=1", "NO_LOCAL_DEADLINE", "FENCED"),
    # An event is parked in the other partition between look-up and marker. Trap 31.
    Run("backlog", "MISHAPS=0", "LOOK_UP_BEFORE_MARKERS", "NO_DOUBLE"),
    # A waiting event arrives again and is applied.
    Run("backlog", "MISHAPS=0", "NO_LOOK_UP_OF_EVENTS", "NO_DOUBLE"),
    # The same with a dead letter.
    Run("backlog", "MISHAPS=0", "NO_LOOK_UP_OF_DEAD_EVENTS", "NO_DOUBLE"),
    # A record runs while an earlier one of its key waits. Trap 7.
    Run("backlog", "MISHAPS=0", "NO_LOOK_UP_OF_KEYS", "IN_ORDER"),
    # A record runs while its key is held.
    Run("backlog", "MISHAPS=0", "NO_LOOK_UP_OF_HOLDING_KEYS", "IN_ORDER"),
    # An applied event is parked.
    Run("backlog", "MISHAPS=0", "PARKED_WITHOUT_MARKER", "NO_DOUBLE"),
    # The lane treats the row as a duplicate and deletes it.
    Run("backlog", "MISHAPS=0", "PARKED_KEEPS_ITS_MARKER", "NO_LOSS"),
    # The same, by the marker of a duplicate whose original waits.
    Run("backlog", "MISHAPS=0", "DUPLICATE_KEEPS_ITS_MARKER", "NO_LOSS"),
    # A follower is parked behind a row that is gone at its commit.
    Run("backlog", "MISHAPS=0", "FOLLOWER_BORN_NOT_DUE", "NO_ORPHAN"),
    # A new follower is due and overtakes the row that waits for its retry. Trap 7.
    Run("backlog", "MISHAPS=0", "RUN_FROM_THE_DUE_ROW", "IN_ORDER"),
    # Row 1 holds; a run takes rows 0 and 2.
    Run("backlog", "FAILURES=2 MISHAPS=0 BATCH=1", "RUN_PAST_A_HOLDING_ROW", "IN_ORDER"),
    # The next row is chosen without a follower committed since, which was demoted.
    Run("backlog", "MISHAPS=0", "NEXT_ROW_AS_READ", "NO_ORPHAN"),
    # A row that was decided runs once more, as the answer to the commit was lost.
    Run("backlog", "FAILURES=2 BATCH=1 RUN=1 DECISIONS=0", "ROWS_AS_READ", "NO_DOUBLE"),
    # An applied row is deleted without a marker.
    Run("backlog", "MISHAPS=0", "SETTLED_WITHOUT_MARKER", "NO_DOUBLE"),
    # A paused worker continues beside its successor. Trap 5.
    Run("backlog", "BATCH=1 RUN=1 DECISIONS=0", "NO_LANE_TOKEN", "FENCED"),
    # The token is read, not locked: a zombie's demotion commits after its successor's run.
    # Trap 4.
    Run("backlog", "BATCH=1 RUN=1 DECISIONS=0", "NO_LANE_LOCK", "NO_ORPHAN"),
    # A holding row is discarded; a worker with an older snapshot demotes the next one.
    Run("backlog", "MISHAPS=0", "DECISION_WITHOUT_LANE_LOCK", "NO_ORPHAN"),
    # A discarded event arrives again and is applied.
    Run("backlog", "MISHAPS=0", "DISCARDED_WITHOUT_MARKER", "NO_DOUBLE"),
    # No row of the key waits, and the record is applied beside its pause.
    Run("backlog", "FAILURES=0 MISHAPS=0 PAUSES=1", "NO_LOOK_UP_OF_PAUSES", "PAUSED"),
    # A worker has read the row, then its key is paused.
    Run("backlog", "MISHAPS=0 DECISIONS=0 PAUSES=1", "HEADS_AS_READ", "PAUSED"),
    # A worker has read that the pause is over, then it is prolonged.
    Run("backlog", "FAILURES=0 MISHAPS=0 PAUSES=2", "PROLONGED_PAUSE_ENDS", "PAUSED"),
    # A record was parked behind the pause, and demoted.
    Run("backlog", "FAILURES=0 MISHAPS=0 PAUSES=1", "PAUSE_ENDS_ALONE", "NO_ORPHAN"),
)


def require_tools() -> None:
    """Raise `CheckError` if Spin or a C compiler is missing; `make model` installs them."""
    if not all(shutil.which(tool) for tool in ("spin", "gcc")):
        raise CheckError(f"The models need Spin and gcc. Install them:\n{INSTALL_HINT}")


def search(runs: Sequence[Run]) -> Iterator[Outcome]:
    """Search them, as many at once as there are processors; in the order given."""
    require_tools()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(_search, runs)


def _search(run: Run) -> Outcome:
    folder = BUILD / str(run)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source = os.path.relpath(MODELS / f"{run.model}.pml", folder)
    _execute(folder, "spin", *run.definitions, "-a", source)
    _execute(folder, "gcc", "-w", "-O1", f"-DMEMLIM={MEMORY_MB}", *_options(run), "-opan", "pan.c")
    said = _execute(folder, "./pan", f"-m{DEPTH}", *(["-l"] if run.is_for_cycles else []))
    outcome = _read(run, said)
    if outcome.found:
        trail = next(folder.glob("*.trail")).name
        told = _execute(folder, "spin", *run.definitions, "-t", "-k", trail, source)
        (BUILD / f"{run}.txt").write_text(_story(outcome, told), "utf-8")
    return outcome


def _options(run: Run) -> list[str]:
    """How the verifier is built: breadth first, the first counter-example is a shortest one."""
    if run.is_for_cycles:
        return ["-DNP", "-DCOLLAPSE"]
    return ["-DSAFETY", "-DBFS" if run.fault else "-DCOLLAPSE"]


def _execute(folder: Path, *command: str) -> str:
    result = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # The verifier and the replay of a trail end with an error when they have found one.
    if result.returncode and "pan:" not in result.stdout and "-t" not in command:
        raise CheckError(f"{' '.join(command)} failed in {folder}:\n{result.stdout}")
    return result.stdout


def _read(run: Run, said: str) -> Outcome:
    error = re.search(r"^pan:1: (.*?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
    states = re.search(r"^\s*([\d.e+]+) states, stored", said, re.MULTILINE)
    depth = re.search(r"depth reached (\d+)", said)
    found = error.group(1) if error else ""
    return Outcome(
        run=run,
        states=int(float(states.group(1))) if states else 0,
        depth=int(depth.group(1)) if depth else 0,
        found=found,
        gap="" if found else _gap(said),
    )


def _gap(said: str) -> str:
    """Why a search without an error does not cover the model, or nothing."""
    if "errors: 0" not in said or "Search not completed" in said:
        return "the search did not end: memory?"
    if "max search depth too small" in said:
        return "the search was not deep enough"
    return ""


def _story(outcome: Outcome, told: str) -> str:
    """What happens in a counter-example, step by step."""
    steps = [line.strip() for line in told.splitlines()]
    end = next((at for at, step in enumerate(steps) if step.startswith("spin: trail ends")), None)
    steps = [step for step in steps[:end] if step and not step.startswith(("spin:", "Never"))]
    return "\n".join([f"{outcome.run.title}: {outcome.result}", "", *steps, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each search; returns 1 if one is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m model.check", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small bounds only")
    options = parser.parse_args(arguments)
    runs = [*(QUICK if options.quick else FULL), *FAULTS]
    print(COLUMNS.format("model", "what", "bounds", "states", "result"))
    failures = 0
    try:
        for outcome in search(runs):
            run = outcome.run
            row = (run.model, run.title, run.bounds, f"{outcome.states:,}", outcome.result)
            print(COLUMNS.format(*row), flush=True)
            failures += not outcome.is_as_expected
    except CheckError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"\nCounter-examples, to be read: {os.path.relpath(BUILD)}/*.txt")
    if failures:
        print(f"{failures} of {len(runs)} searches did not end as they should.", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
