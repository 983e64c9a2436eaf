"""What a person gets to read in a table, on a terminal and elsewhere."""

import pytest

from operate.output import print_table

LONG = "aggregate versions differ: " + "a reason of many words " * 10


def test_elsewhere_than_on_a_terminal_each_row_is_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(
        ("id", "count", "why"), [("7d0f2c5e", "12", LONG), ("a", "7", "x")], right=("count",)
    )
    names, first, second = capsys.readouterr().out.splitlines()
    assert names.split() == ["id", "count", "why"]
    assert first == f"7d0f2c5e     12  {LONG}".rstrip()
    assert second == "a             7  x"


def test_a_narrow_terminal_cuts_nothing_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(("id", "why"), [("7d0f2c5e1b1d4c57", LONG)])
    names, *lines = capsys.readouterr().out.splitlines()
    assert "\x1b[1m" in names
    assert lines[0].startswith("7d0f2c5e1b1d4c57  aggregate"), "an id can be copied whole"
    assert all(len(line) <= 40 for line in lines)
    told = " ".join(line[18:] for line in lines)
    assert told.split() == LONG.split()


def test_what_a_payload_holds_is_only_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key",), [("[red]\x1b[2J:smile:\nnext",)])
    assert capsys.readouterr().out.splitlines()[1:] == [r"[red]\x1b[2J:smile:\nnext"]


def test_without_rows_there_is_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id",), [])
    assert capsys.readouterr().out == ""
