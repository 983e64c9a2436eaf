"""What a person gets to read in a table, on a terminal and elsewhere."""

import json
import re
from contextlib import redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward import redaction
from onceward.cli import output
from onceward.cli.output import print_fields, print_json, table, write

LONG = "aggregate versions differ: " + "a reason of many words " * 10
HOSTILE = "a\x1b[2J\x9b2J\x85\u2028\u202e\u200b\U000e0041\ud800\x7fb"
ESCAPED = r"a\u001b[2J\u009b2J\u0085\u2028\u202e\u200b\udb40\udc41\ud800\u007fb"
SOURCES = Path(output.__file__).parents[2]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": f"{columns}"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)


def print_table(*arguments: Any, **options: Any) -> None:
    for line in table(*arguments, **options):
        write(line)


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
    on_a_terminal(monkeypatch, 40)
    print_table(("id", "why"), [("7d0f2c5e1b1d4c57", LONG)])
    names, *lines = capsys.readouterr().out.splitlines()
    assert "\x1b[1m" in names
    assert lines[0].startswith("7d0f2c5e1b1d4c57  aggregate"), "an id can be copied whole"
    assert all(len(line) <= 40 for line in lines)
    told = " ".join(line[18:] for line in lines)
    assert told.split() == LONG.split()


@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_table_shows_what_a_payload_holds_and_obeys_none_of_it(
    has_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_terminal:
        on_a_terminal(monkeypatch, 200)
    print_table(("key",), [(f"[red]:smile:\nnext{HOSTILE}",)])
    assert capsys.readouterr().out.splitlines()[1:] == [rf"[red]:smile:\nnext{ESCAPED}"]


def test_fields_lines_and_json_are_written_without_control_and_format_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_fields({"key": HOSTILE, f"header {HOSTILE}": 1}, HOSTILE)
    write(HOSTILE)
    write(HOSTILE, err=True)
    said = capsys.readouterr()
    assert said.out.count(ESCAPED) == 4
    assert said.err == f"{ESCAPED}\n"
    assert (said.out + said.err).replace("\n", "").isprintable()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_json_of_any_text_is_visible_and_means_the_same(text: str) -> None:
    with redirect_stdout(TextIOWrapper(BytesIO(), "utf-8")) as said:
        print_json({"key": text})
    line = said.buffer.getvalue().decode().removesuffix("\n")
    assert redaction.harmless(line) == line
    assert json.loads(line) == {"key": text}


def test_letters_and_spaces_of_every_language_are_written_as_they_are() -> None:
    text = "Größe 大小\u3000サイズ\u00a0размер حجم 📦\tx\n"
    assert redaction.harmless(text) == text


def test_commands_write_by_one_function_only() -> None:
    others = [
        path.relative_to(SOURCES)
        for path in SOURCES.rglob("*.py")
        if path.name != "output.py" and re.search(r"\b(?:typer|click)\.s?echo\b", path.read_text())
    ]
    assert others == []


def test_without_rows_there_is_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id",), [])
    assert capsys.readouterr().out == ""
