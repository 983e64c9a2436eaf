"""What `make prove` applies twice, under faults and one by one, and compares."""

# <% if cookiecutter.worked_example in ("parcels", "yes") %>
# <% if cookiecutter.outside_calls == "yes" %>
import os
# <% endif %>
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from random import Random

from onceward.prove import Proof

# <% if cookiecutter.outside_calls == "yes" %>
os.environ["DELAY_WEBHOOK"] = "https://webhook.invalid"  # calls are noted, and not made

# <% endif %>
from <<cookiecutter.package_name>>.events import ScanRecorded
from <<cookiecutter.package_name>>.main import service

START = datetime(2026, 1, 1, tzinfo=UTC)


def messages(chance: Random) -> Iterator[ScanRecorded]:
    """Yield scans of 40 parcels."""
    for number in range(300):
        yield ScanRecorded(
            scanner=f"scanner-{number % 5}",
            number=number,
            parcel_id=f"parcel-{chance.randrange(40)}",
            place=chance.choice(("Vienna", "Graz", "Linz")),
            scanned_at=START + timedelta(minutes=number),
            minutes_late=chance.choice((None, 5, 90)),
        )


proof = Proof(service, messages=messages)
# <% elif cookiecutter.worked_example == "payments" %>
# <% if cookiecutter.outside_calls == "yes" %>
import os
# <% endif %>
from collections.abc import Iterator
from random import Random

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from onceward.prove import Proof
from onceward.testing import Sent

# <% if cookiecutter.outside_calls == "yes" %>
os.environ["BANK_URL"] = "https://bank.invalid"  # calls are noted, and not made

# <% endif %>
from <<cookiecutter.package_name>>.events import (
    AuthorizePayment,
    CapturePayment,
    DepositReceived,
    RefundPayment,
    # <% if cookiecutter.outside_calls == "yes" %>
    RequestPayout,
    # <% endif %>
)
from <<cookiecutter.package_name>>.main import service
from <<cookiecutter.package_name>>.tables import Account

BANK = "bank:at"


def messages(chance: Random) -> Iterator[Sent]:
    """Yield deposits, and what becomes of payments."""
    for number in range(60):
        customer, merchant = f"customer:{chance.randrange(8)}", f"merchant:{chance.randrange(3)}"
        deposit = DepositReceived(
            deposit_id=f"deposit:{number}",
            bank_account=BANK,
            customer=customer,
            amount=chance.randrange(1, 900),
        )
        yield Sent(deposit, key=customer)
        id, amount = f"payment:{number}", chance.randrange(1, 900)
        payment = {"payment_id": id, "customer": customer, "merchant": merchant}
        yield Sent(AuthorizePayment(**payment, amount=amount), key=id)
        yield Sent(CapturePayment(**payment, amount=chance.randrange(1, amount + 1)), key=id)
        refund = RefundPayment(**payment, refund_id=f"refund:{number}", amount=amount // 2 + 1)
        yield Sent(refund, key=id)
        # <% if cookiecutter.outside_calls == "yes" %>
        payout = RequestPayout(
            payout_id=f"payout:{number}",
            merchant=merchant,
            bank_account=BANK,
            amount=chance.randrange(1, 300),
        )
        yield Sent(payout, key=payout.payout_id)
        # <% endif %>


async def accounts_balance(session: AsyncSession) -> None:
    """Money only moves between accounts."""
    assert not await session.scalar(select(func.sum(Account.balance)))


proof = Proof(
    service,
    messages=messages,
    invariants=[accounts_balance],
    # <% if cookiecutter.outside_calls == "yes" %>
    stand_ins={"pay-out": lambda command, call: command.amount % 7 > 0},
    # <% endif %>
)
# <% else %>
from onceward.prove import Proof

from <<cookiecutter.package_name>>.main import service

proof = Proof(service)
# <% endif %>
