"""A bank as a program with an HTTP API: `python -m tests.onceward.http.app`."""

from onceward.cli.commands import command_line
from onceward.http.commands import group as api_commands

from .served import service

if __name__ == "__main__":
    api = api_commands(service, f"{__package__}.api")
    command_line(service, api=api)()
