"""The bank with its page and a correction, as a program: `python -m tests.page.app page`."""

from importlib.util import find_spec

from operate.commands import command_line
from page.commands import group

from tests.pipeline.integration.app import bank
from tests.pipeline.integration.bank import add_undo

add_undo(bank)

if __name__ == "__main__":
    more = ["history.views"] if find_spec("history") else []
    command_line(bank.service, page=group(bank.service, *more))()
