"""What a message costs, in instructions and statements: no more than is recorded."""

import asyncio
import copy
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import instructions
from benchmarks.instructions import KINDS, Entry, Kind, count, faults, load_record, missing
from benchmarks.kept import MEASURING
from benchmarks.rig import Rig
from benchmarks.run import rig_in
from benchmarks.wire import Wire
from demo.processes import ProcessFailed
from demo.running import only_one_in

from tests import programs
from tests.baked import ROOT

RECORDED: Entry = {
    "pins": "one",
    "counts": {"orm": {"instructions": 1_000_000, "round_trips": 16.0, "statements": 0.5}},
}


def changed(**counts: float) -> Entry:
    """An entry that differs from RECORDED in some counts."""
    entry = copy.deepcopy(RECORDED)
    entry["counts"]["orm"].update(counts)
    return entry


@pytest.mark.parametrize(
    ("found", "said"),
    [
        pytest.param(changed(), None, id="equal"),
        pytest.param(changed(instructions=1_029_000), None, id="within 3 %"),
        pytest.param(changed(instructions=971_000), None, id="within 3 %, cheaper"),
        pytest.param(
            changed(instructions=1_031_000),
            "orm: 1,031,000 instructions a message, recorded are 1,000,000 (+3.1%): each message"
            " costs more than before.",
            id="slower",
        ),
        pytest.param(changed(instructions=969_000), "(-3.1%): cheaper, ", id="faster"),
        pytest.param(
            changed(round_trips=16.125), "orm: 16.12 round trips a batch", id="round trip"
        ),
        pytest.param(changed(statements=1.5), "orm: 1.5 statements a message", id="statement"),
        pytest.param(
            {**changed(instructions=1_500_000), "pins": "other"},
            "(its pinned packages differ)",
            id="other packages",
        ),
        pytest.param(
            {"pins": "one", "counts": {"new": RECORDED["counts"]["orm"]}},
            "new has no record.",
            id="a new kind",
        ),
    ],
)
def test_a_count_that_differs_from_the_record_is_reported(found: Entry, said: str | None) -> None:
    reported = list(faults(RECORDED, found))
    if said is None:
        assert reported == []
    else:
        assert len(reported) == 1
        assert said in reported[0]
        assert "make instructions RENEW=1" in reported[0]


def test_a_build_without_a_record_is_reported_with_what_to_add() -> None:
    assert "has no record of CPython 3.99" in missing("CPython 3.99", RECORDED)
    assert '"instructions": 1000000' in missing("CPython 3.99", RECORDED)


def test_the_page_shows_the_record() -> None:
    assert instructions.page(load_record()) == MEASURING.read_text("utf-8")


FIRST_RECORD = {"orm": 612_353, "sql": 349_656, "alone": 6_014_954}
"""Instructions before failures were isolated by the ladder: messages that succeed pay nothing."""
PAID = {
    "faults of the process, of Kafka's log and of copies": 0.021,
    "releases, pauses and delays": 0.0096,
}
"""Share that was added since, by what it pays for: measured with the ORM on one machine."""


def test_the_record_does_not_exceed_the_first_one_plus_recorded_additions() -> None:
    share = 1.002 + sum(PAID.values())  # counts of one commit differ by 0.2 %
    for entry in load_record().values():
        counted = {kind: entry["counts"][kind]["instructions"] for kind in FIRST_RECORD}
        assert all(counted[kind] <= share * first for kind, first in FIRST_RECORD.items()), counted


def test_messages_to_postgresql_are_counted_however_they_are_written() -> None:
    class Sink:
        data = b""

        def write(self, data: bytes) -> None:
            self.data += data

    startup, query, sync = b"\0\0\0\x08abcd", b"Q\0\0\0\x06S\0", b"S\0\0\0\x04"
    sink, Wire.sent = Sink(), Wire.sent.copy()
    Wire.sent.clear()
    wire = Wire(sink)
    wire.write(startup + query[:3])
    wire.writelines([query[3:], sync + sync])
    assert Wire.sent == {ord("Q"): 1, ord("S"): 2}
    assert sink.data == startup + query + sync + sync


async def test_a_kind_is_counted_again_while_servers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[list[str]] = []

    async def run(_: Rig, kinds: dict[str, Kind]) -> tuple[str, dict[str, dict[str, Any]]]:
        attempts.append(list(kinds))
        fails = {"sql"} if len(attempts) == 1 else {"alone"} if len(attempts) > 2 else set()
        return "build", {
            name: {"instructions": len(attempts), "warnings": ["no broker"] * (name in fails)}
            for name in kinds
        }

    monkeypatch.setattr(instructions, "_run", run)
    rig = rig_in(Path())
    _, found = await instructions._undisturbed(rig, {name: KINDS[name] for name in ("orm", "sql")})
    assert found == {"orm": {"instructions": 1}, "sql": {"instructions": 2}}
    assert attempts == [["orm", "sql"], ["sql"]]
    with pytest.raises(ProcessFailed, match="alone: no broker"):
        await instructions._undisturbed(rig, {"alone": KINDS["alone"]})


@dataclass
class Counted:
    """What was counted, and the rig for further counts."""

    runner: asyncio.Runner
    rig: Rig
    build: str
    entry: Entry


@pytest.fixture(scope="module")
def counted() -> Iterator[Counted]:
    programs.require("valgrind")
    folder = ROOT / "build" / "instructions"  # keeps its environment for the next run
    with only_one_in(folder), asyncio.Runner() as runner:
        rig = runner.run(instructions.rig_with_service(folder))
        stack = AsyncExitStack()
        runner.run(stack.enter_async_context(rig.started()))
        try:
            yield Counted(runner, rig, *runner.run(count(rig)))
        finally:
            runner.run(stack.aclose())


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.timeout(3_600)
def test_a_message_costs_what_is_recorded(counted: Counted) -> None:
    recorded = load_record().get(counted.build)
    if recorded is None:
        programs.lacking(missing(counted.build, counted.entry))
    assert list(faults(recorded, counted.entry)) == []


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.timeout(3_600)
def test_a_loop_for_each_message_is_noticed(counted: Counted) -> None:
    codec = counted.rig.project / "src" / "onceward" / "events" / "codec.py"
    codec.write_text(
        codec.read_text()
        + "\n_quick = decode\n\ndef decode(*args, **options):\n"
        + "    sum(range(1_000))\n    return _quick(*args, **options)\n"
    )
    _, slower = counted.runner.run(count(counted.rig, {"sql": KINDS["sql"]}))
    [fault] = faults(counted.entry, slower)
    assert "instructions a message" in fault
    assert "costs more" in fault
