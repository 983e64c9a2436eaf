"""The table of reasons against the code that gives them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import onceward
from onceward.apply.claim_check import Unavailability
from onceward.cli import dead_events, dead_letters
from onceward.events.message import Reason
from onceward.relay import rejections

from tests.onceward import rooms

ENGINE = Path(onceward.__file__).parent
CLI = ENGINE / "cli"
GIVEN = {
    # What is called with a reason, and at which place.
    "Decision": 0,
    "Undecoded": 1,
    "dead": 1,
}
PASSED_ON = {
    "CORRECTION",
    "DIED",
    "FORGOTTEN",
    "GAP",
    "UNKNOWN",
    "error.reason",
    "found.reason",
    "item.fault.reason",
    "item.undecoded",
    "one.reason",
    "reason",
    "failure.reason",
    "UNDECIDED",
    "ISOLATED",
    "PARKED",
    "LOST",
    "REDRIVEN",
}
"""What holds a reason that is given elsewhere."""


def reasons(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.IfExp):
        yield from reasons(node.body)
        yield from reasons(node.orelse)
    elif isinstance(node, ast.BoolOp):
        for one in node.values:
            yield from reasons(one)
    elif isinstance(node, ast.Constant):
        yield str(node.value)
    else:
        assert ast.unparse(node) in PASSED_ON, ast.unparse(node)


def test_every_reason_that_the_engine_gives_is_explained_and_no_other() -> None:
    given = {str(one) for one in (*Reason, *get_args(Unavailability))}
    for path in (*rooms.files(), *CLI.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in GIVEN:
                place = GIVEN[ast.unparse(node.func)]
                if len(node.args) > place:
                    given |= set(reasons(node.args[place]))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
                "DIED",
                "FORGOTTEN",
                "GAP",
                "LOCKED_OUT",
                "LOST",
                "PARKED",
                "PAUSED",
                "CORRECTION",
                "REDRIVEN",
                "UNDECIDED",
                "UNKNOWN",
                "ISOLATED",
                "failure.reason",
            ):
                given |= set(reasons(node.value))
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "reason":
                given |= set(reasons(node.value or ast.Constant(""))) - {"", "None"}
    assert given == set(dead_letters.REASONS)


def test_exactly_the_reasons_for_unsent_events_are_explained() -> None:
    rooms = "operators/statements.py", "relay/statements.py"
    files = CLI / "dead_events.py", *(ENGINE / one for one in rooms)
    source = "".join(file.read_text() for file in files)
    in_sql = set(re.findall(r"reason(?: =|,) '(\w[^']*)'", source))
    assert in_sql == {"follows another", "redriven"}
    assert {*get_args(rejections.RejectionReason), *in_sql} == set(dead_events.REASONS)


def test_what_may_be_dead_again_after_a_redrive_may_also_be_discarded() -> None:
    for reason, advice in {**dead_letters.REASONS, **dead_events.REASONS}.items():
        assert "discard" in advice or "then redrive" not in advice, reason
