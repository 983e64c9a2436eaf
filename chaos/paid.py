"""The payments example as the rig runs it: as it is, with retries that fit a round.

`python -m chaos.paid <command>` is the command `service`.
"""

from dataclasses import replace

from payment_ledger.main import NAME  # type: ignore[import-not-found]

from onceward import Handlers, Service
from onceward.cli.commands import command_line

from benchmarks.payments_example import HANDLERS, TABLES
from chaos.poison import SCHEDULE

TOPIC = "payments"

handlers = Handlers()
handlers.topic(TOPIC, demands_types=True)
for one in HANDLERS:
    handlers.add(replace(one, policy=replace(one.policy, schedule=SCHEDULE)))

if __name__ == "__main__":
    command_line(Service(NAME, handlers=handlers, metadata=TABLES)).run_process()
