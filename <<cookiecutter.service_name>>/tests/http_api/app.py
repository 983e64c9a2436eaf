"""A bank as a program with an HTTP API: `python -m tests.http_api.app`."""

from http_api.commands import group as api_commands
from operate.commands import command_line

from .served import bank

if __name__ == "__main__":
    api = api_commands(bank.service, f"{__package__}.api")
    command_line(bank.service, api=api)()
