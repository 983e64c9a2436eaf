"""The bank as a program that tells an outside of its deposits.

`python -m tests.onceward.effects.app` runs it.
"""

import os
import signal

from onceward import Event, Policy, Transaction
from onceward.cli.commands import command_line
from onceward.effects import Call, Effects, EffectWorkers

from tests.contract.bank import Deposited
from tests.onceward.blocking import be_stopped
from tests.onceward.integration.bank import Bank

bank = Bank(
    deposits=os.environ["BANK_DEPOSITS"],
    balances=os.environ["BANK_BALANCES"],
    name=os.environ["BANK_NAME"],
    workers=[EffectWorkers],
)
effects = Effects(bank.handlers)
QUICK = Policy(schedule=(0.05,))


class Told(Event, type="told"):
    """The outside is to know of a deposit."""


@bank.handlers.on(Deposited, topic=bank.deposits, consumer="have told")
async def have_told(event: Deposited, tx: Transaction) -> None:
    """Have the outside told."""
    tx.call(Told(), key=event.account)


@effects.on(Told, consumer="tell", policy=QUICK)
async def tell(event: Told, call: Call) -> None:
    """Make a call that may be repeated."""
    remember("tell", call)


@effects.on(Told, consumer="pay", policy=QUICK, repeatable=False)
async def pay(event: Told, call: Call) -> None:
    """Make a call that must not be."""
    remember("pay", call)


def remember(consumer: str, call: Call) -> None:
    """Write the call into a file, as an outside that outlives this process."""
    if os.environ["BANK_DIES"] == f"{consumer} stops":
        be_stopped()
    die_if(f"{consumer} before")
    with open(os.environ["BANK_OUTSIDE"], "a") as outside:
        outside.write(f"{consumer} {call.id}\n")
    die_if(f"{consumer} after")


def die_if(moment: str) -> None:
    """Die by kill -9 if this is the moment for it."""
    if moment == os.environ["BANK_DIES"]:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    command_line(bank.service)()
