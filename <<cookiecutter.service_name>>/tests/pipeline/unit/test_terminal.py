"""The command line, without a server."""

import os
import subprocess
import sys
from pathlib import Path

from operate import terminal

PRINTS_MUCH = """
import typer
from operate.terminal import Program, in_a_sentence

app = Program()

@app.command()
def lines() -> None:
    with in_a_sentence():
        for number in range(100_000):
            typer.echo(number)

app()
"""


def test_a_command_ends_quietly_when_its_output_is_not_read_to_the_end() -> None:
    command = [sys.executable, "-c", PRINTS_MUCH]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(terminal.__file__).parents[1])},
    )
    with process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
