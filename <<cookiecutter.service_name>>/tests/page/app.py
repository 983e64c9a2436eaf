"""The bank with its page, as a program: `python -m tests.page.app page`."""

from importlib.util import find_spec

from operate.commands import command_line
from page.commands import group

from tests.pipeline.integration.app import bank

if __name__ == "__main__":
    more = ["history.views"] if find_spec("history") else []
    command_line(bank.service, page=group(bank.service, *more))()
