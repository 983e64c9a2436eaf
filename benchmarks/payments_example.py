"""The generated payments example, from which BENCH_WITHOUT removes `entries`, `CHECK` or both.

Without entries a move of money only changes balances. Without CHECK the mapped classes have none;
the measure `ledger` removes it from the tables.
"""

import os
from typing import Any

from payment_ledger import handlers as example  # type: ignore[import-not-found]
from payment_ledger import tables
from payment_ledger.events import (  # type: ignore[import-not-found]
    AuthorizePayment,
    CapturePayment,
    PaymentAuthorized,
    PaymentCaptured,
    PaymentRefunded,
    PaymentRefused,
    RefundPayment,
)
from sqlalchemy import CheckConstraint

TABLES = tables.Base.metadata
COMMANDS = (AuthorizePayment, CapturePayment, RefundPayment)
EVENTS = (PaymentAuthorized, PaymentCaptured, PaymentRefunded, PaymentRefused)
HANDLERS = [one for one in example.handlers if one.event in COMMANDS]
"""Those of the commands, as the example registers them."""


def _move_without_entries(amount: int, source: Any, target: Any, reference: str) -> list[Any]:
    source.balance -= amount
    target.balance += amount
    return []


WITHOUT = frozenset(os.environ.get("BENCH_WITHOUT", "").split())
if "entries" in WITHOUT:
    example.move = _move_without_entries
if "CHECK" in WITHOUT:
    for table in TABLES.tables.values():
        table.constraints -= {one for one in table.constraints if isinstance(one, CheckConstraint)}
