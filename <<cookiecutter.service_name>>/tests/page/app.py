"""The bank with its page, as a program: `python -m tests.page.app page`."""

from operate.commands import command_line
from page.commands import group

from tests.pipeline.integration.app import bank

if __name__ == "__main__":
    command_line(bank.service, page=group(bank.service))()
