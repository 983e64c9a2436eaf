"""The bank of the program in `app.py`, named by the environment."""

import os

from .cashier import with_cashier
from tests.onceward.integration.bank import Bank

bank = with_cashier(
    Bank(
        deposits=os.environ["BANK_DEPOSITS"],
        balances=os.environ["BANK_BALANCES"],
        name=os.environ["BANK_NAME"],
    )
)
