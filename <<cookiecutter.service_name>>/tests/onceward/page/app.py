"""The bank with its page and a correction, as a program.

`python -m tests.onceward.page.app page` runs it.
"""

from importlib.util import find_spec

from onceward.cli.commands import command_line
from onceward.page.commands import group

from tests.onceward.integration.app import bank
from tests.onceward.integration.bank import add_undo

add_undo(bank)

if __name__ == "__main__":
    more = ["onceward.history.views"] if find_spec("onceward.history") else []
    command_line(bank.service, page=group(bank.service, *more))()
