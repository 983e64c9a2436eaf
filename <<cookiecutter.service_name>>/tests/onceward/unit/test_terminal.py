"""The command line, without a server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onceward.cli import terminal

from tests.servers.waiting import PATIENCE

SOURCES = Path(terminal.__file__).parents[2]
PROGRAM = """
import asyncio
import typer
from onceward.cli.output import write
from onceward.cli.terminal import Program, in_a_sentence, naming_servers, run_to_end
from onceward.settings import Settings

url = "postgresql+asyncpg://s:s@nowhere/s"
settings = Settings(database_url=url, kafka_bootstrap_servers="nowhere:9092")
app = Program()

async def work(number: int) -> None:
    async with await asyncio.start_server(print, "127.0.0.1", 0):
        with naming_servers(settings):
            for one in range(number):
                write(f"line {one}")

@app.command()
def lines(number: int, code: int = 0) -> None:
    run_to_end(work(number))
    write("the work is done", err=True)
    raise typer.Exit(code)

@app.command()
def read() -> None:
    with in_a_sentence(), naming_servers(settings):
        open("rates.csv")

@app.command()
def fail() -> None:
    raise RuntimeError("\\x9b2J")

app()
"""
LEAVES = """
import asyncio
import atexit
import threading
import time
from contextlib import suppress

import typer
from onceward.cli.terminal import Program, run_to_end

app = Program()

def hang() -> None:
    time.sleep(600)

async def stay() -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)

async def work(left: str) -> None:
    match left:
        case "a call":
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(hang), 0.1)
        case "a thread":
            threading.Thread(target=hang).start()
        case "a function of atexit":
            atexit.register(hang)
        case "a task":
            asyncio.create_task(stay())
            await asyncio.sleep(0)

@app.command()
def leave(left: str, code: int) -> None:
    run_to_end(work(left))
    run_to_end(work("nothing"))  # as `migrate`, which does its work in two steps
    raise typer.Exit(code)

app.run_process()
"""
SERVES = """
import logging

from onceward.cli.terminal import Program, run_to_end, serving
from onceward.observe import logs

app = Program()

async def fail(error: str) -> None:
    logs.configure(level="INFO", json=False, queues=True)
    for _ in range(1_000):
        logging.getLogger("onceward").info(1_000 * "x")
    raise eval(error)

@app.command()
def serve(error: str) -> None:
    with serving() as report:
        run_to_end(fail(error), report)

app()
"""
NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


def start(arguments: str, program: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
    """Start a program from a shell, which can redirect and close its standard streams."""
    line = f'exec "$0" -c "$1" {arguments}'
    return subprocess.Popen(
        ["sh", "-c", line, sys.executable, program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{SOURCES}"} | environment,
    )


def run(arguments: str, program: str = PROGRAM) -> tuple[int, str, str]:
    """Run a program to its end: its exit code, output and errors."""
    with start(arguments, program) as process:
        try:
            output, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    return process.returncode, output, errors


def test_a_command_ends_quietly_when_its_output_is_not_fully_read() -> None:
    with start("lines 100000") as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_with_closed_standard_streams_ends_with_its_own_code(closed: str) -> None:
    ended, output, errors = run(f"lines 2 --code 3 {closed}")
    assert ended == 3, errors
    assert output == ("" if ">&-" in closed.split() else "line 0\nline 1\n")
    assert errors == ("" if "2>&-" in closed else "the work is done\n")


@NEEDS_FULL
@pytest.mark.parametrize("arguments", ["lines 2", "--help", "lines --help"])
def test_an_output_that_cannot_be_written_is_named_as_such(arguments: str) -> None:
    ended, _, errors = run(f"{arguments} >/dev/full")
    assert ended == 1
    (line,) = errors.splitlines()
    assert line.startswith("standard output can't be written")
    assert line.endswith("No space left on device")


@NEEDS_FULL
def test_errors_that_cannot_be_written_change_nothing_of_the_work() -> None:
    assert run("lines 2 --code 3 2>/dev/full") == (3, "line 0\nline 1\n", "")


@pytest.mark.parametrize("left", ["a call", "a thread", "a function of atexit", "a task"])
def test_a_command_ends_with_its_own_code_whatever_its_work_leaves_behind(left: str) -> None:
    ended, _, errors = run(f"'{left}' 3", LEAVES)
    assert ended == 3, errors
    assert ("in hang" in errors) == (left != "a task")


@pytest.mark.parametrize(
    ("error", "code"),
    [("OSError", 1), ("SystemExit(7)", 7), ("SystemExit(0)", 1), ("KeyboardInterrupt", 130)],
)
def test_a_process_that_serves_ends_even_if_nothing_reads_why(error: str, code: int) -> None:
    with start(f"'{error}'", SERVES, PIPELINE_LOG_JSON="false") as process:
        try:
            assert process.wait(PATIENCE) == code
        finally:
            process.kill()


def test_an_unexpected_error_is_written_without_characters_that_a_terminal_interprets() -> None:
    ended, _, errors = run("fail")
    assert ended == 1
    assert errors.endswith("RuntimeError: \\u009b2J\n")


def test_a_file_that_is_missing_is_no_error_of_postgresql() -> None:
    ended, _, errors = run("read")
    assert ended == 1
    assert errors.startswith("FileNotFoundError: ")
    assert "rates.csv" in errors
