"""What the service does with each event."""

# <% if cookiecutter.worked_example in ("parcels", "yes") %>
# <% if cookiecutter.outside_calls == "yes" %>
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor
from pydantic import SecretStr
from pydantic_settings import BaseSettings

# <% endif %>
from onceward import Handlers, Transaction
# <% if cookiecutter.outside_calls == "yes" %>
from onceward.effects import Call, Effects
# <% endif %>

from .events import ParcelDelayed, ParcelMoved, ScanRecorded
from .tables import Parcel
# <% elif cookiecutter.worked_example == "payments" %>
# <% if cookiecutter.outside_calls == "yes" %>
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
# <% else %>
from collections.abc import Sequence
# <% endif %>
# <% if cookiecutter.http_api == "yes" %>
from uuid import NAMESPACE_URL, uuid5
# <% endif %>

# <% if cookiecutter.outside_calls == "yes" %>
import httpx2
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor
from pydantic import SecretStr
from pydantic_settings import BaseSettings

from onceward import Handlers, Policy, Reject, Retry, Transaction
from onceward.effects import Call, Effects
# <% else %>
from onceward import Handlers, Policy, Reject, Transaction
# <% endif %>

from .events import (
    AuthorizePayment,
    CapturePayment,
    DepositReceived,
    PaymentAuthorized,
    PaymentCaptured,
    PaymentCommand,
    PaymentRefunded,
    PaymentRefused,
    # <% if cookiecutter.outside_calls == "yes" %>
    PayoutMade,
    PayoutRefused,
    # <% endif %>
    Reason,
    RefundPayment,
    # <% if cookiecutter.http_api == "yes" %>
    RequestPayment,
    # <% endif %>
    # <% if cookiecutter.outside_calls == "yes" %>
    RequestPayout,
    # <% endif %>
)
from .tables import Account, Base, Deposit, Payment, Refund, move
# <% else %>
from onceward import Handlers
# <% if cookiecutter.outside_calls == "yes" %>
from onceward.effects import Effects
# <% endif %>
# <% endif %>

handlers = Handlers()
# <% if cookiecutter.outside_calls == "yes" %>
effects = Effects(handlers)
# <% endif %>
# <% if cookiecutter.worked_example in ("parcels", "yes") %>

LATE = 60
"""Minutes from which a parcel counts as delayed."""
# <% if cookiecutter.outside_calls == "yes" %>


class Outside(BaseSettings):
    """Settings of called services: environment variables of these names."""

    delay_webhook: SecretStr | None = None
    """URL to which each delay is sent; unset: none is. Secret, as its path grants access."""


webhook = Outside().delay_webhook


@dataclass(frozen=True)
class Resources:
    """What a process has open while it runs. Functions take it by its type."""

    client: httpx2.AsyncClient


@asynccontextmanager
async def open_resources() -> AsyncIterator[Resources]:
    """Open the client of called services."""
    # A connection for each call: on a kept one, a late answer would be taken for the next call's.
    limits = httpx2.Limits(max_keepalive_connections=0)
    async with httpx2.AsyncClient(timeout=5.0, limits=limits) as client:
        # Passes the trace on. Its type hints lack httpx2 if httpx is installed as well.
        HTTPX2ClientInstrumentor.instrument_client(client)  # type: ignore[arg-type, unused-ignore]
        yield Resources(client)
# <% endif %>


@handlers.on(ScanRecorded, topic="scans", consumer="record-scan", loads=Parcel.by("parcel_id"))
async def record_scan(scan: ScanRecorded, tx: Transaction) -> None:
    """Store the parcel's place, and publish its move and its delay."""
    parcel = await tx.load_or_create(Parcel, scan.parcel_id)
    parcel.move_to(scan.place, scan.scanned_at)
    tx.publish(
        ParcelMoved(
            parcel_id=parcel.id,
            place=parcel.place,
            scans=parcel.scans,
            scanner=scan.scanner,
            number=scan.number,
        ),
        of=parcel,
    )
    if scan.minutes_late is not None and scan.minutes_late > LATE:
        delayed = ParcelDelayed(
            parcel_id=parcel.id,
            minutes_late=scan.minutes_late,
            scanner=scan.scanner,
            number=scan.number,
        )
        tx.publish(delayed, of=parcel)
        # <% if cookiecutter.outside_calls == "yes" %>
        if webhook:
            tx.call(delayed, of=parcel)


@effects.on(ParcelDelayed, consumer="tell-webhook", timeout=10.0, per_second=100)
async def tell_webhook(delayed: ParcelDelayed, call: Call, client: httpx2.AsyncClient) -> int:
    """Send the delay to the webhook, which drops a repeated call by its key."""
    url = webhook.get_secret_value() if webhook else ""
    headers = {"Idempotency-Key": call.id}
    answer = await client.post(url, json=delayed.model_dump(), headers=headers)
    if not answer.is_success:  # raise_for_status() would add the URL
        raise httpx2.HTTPError(f"the webhook answered {answer.status_code}")
    return answer.status_code
# <% endif %>
# <% if cookiecutter.http_api == "yes" %>


@handlers.on(ScanRecorded, topic=None, consumer="answer-scan", loads=Parcel.by("parcel_id"))
async def answer_scan(scan: ScanRecorded, tx: Transaction) -> dict[str, object]:
    """Record a scan that comes by HTTP, and answer where its parcel is now."""
    await record_scan(scan, tx)
    parcel = await tx.load_or_create(Parcel, scan.parcel_id)
    return {"parcel_id": parcel.id, "place": parcel.place, "scans": parcel.scans}
# <% endif %>
# <% elif cookiecutter.worked_example == "payments" %>
# With money no command may be skipped, and none may overtake a failed one of its payment.
handlers.topic("payments", demands_types=True)
IN_ORDER = Policy(after_death="hold")
# <% if cookiecutter.outside_calls == "yes" %>


class BankSettings(BaseSettings):
    """Settings of the bank: environment variables of these names."""

    bank_url: SecretStr | None = None
    """URL of the bank; unset: payouts are refused."""


class Bank:
    """The bank's HTTP API."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def has(self, reference: str) -> bool:
        """Return whether the bank has a transfer. It does not keep those that it refuses."""
        answer = await self._client.get("/transfers", params={"reference": reference})
        check(answer)
        return bool(answer.json())

    async def transfer(self, reference: str, to: str, amount: int, *, key: str) -> bool:
        """Send a transfer; return whether it is accepted."""
        transfer = {"reference": reference, "to": to, "amount": amount}
        headers = {"Idempotency-Key": key}
        try:
            answer = await self._client.post("/transfers", json=transfer, headers=headers)
        except httpx2.ConnectError as error:
            raise Retry("the bank was not reached") from error
        if answer.status_code == 422:
            return False
        check(answer)
        return True


def check(answer: httpx2.Response) -> None:
    """Raise an error for an unsuccessful answer, without the URL that raise_for_status() adds."""
    if not answer.is_success:
        raise httpx2.HTTPError(f"the bank answered {answer.status_code}")


@dataclass(frozen=True)
class BankResources:
    """What a process has open while it runs. Functions take it by its type."""

    bank: Bank | None
    """None without `BANK_URL`."""


@asynccontextmanager
async def open_resources() -> AsyncIterator[BankResources]:
    """Open a client of the bank, if there is one."""
    url = BankSettings().bank_url
    if url is None:
        yield BankResources(bank=None)
        return
    # A connection for each call: on a kept one, a late answer would be taken for the next call's.
    limits = httpx2.Limits(max_keepalive_connections=0)
    base_url = url.get_secret_value()
    async with httpx2.AsyncClient(base_url=base_url, timeout=5.0, limits=limits) as client:
        # Passes the trace on. Its type hints lack httpx2 if httpx is installed as well.
        HTTPX2ClientInstrumentor.instrument_client(client)  # type: ignore[arg-type, unused-ignore]
        yield BankResources(Bank(client))
# <% endif %>


@handlers.on(
    DepositReceived,
    topic="payments",
    consumer="ledger",
    policy=IN_ORDER,
    loads=[Deposit.by("deposit_id"), Account.by("customer"), Account.by("bank_account")],
)
async def add_deposit(command: DepositReceived, tx: Transaction) -> Reason | None:
    """Add money from a bank to a customer's account."""
    earlier = await tx.load(Deposit, command.deposit_id)
    if earlier is not None:
        if (earlier.customer, earlier.amount) != (command.customer, command.amount):
            raise Reject(f"{earlier.id} was another deposit")  # an operator has to look at it
        return "already deposited"
    bank_account = await tx.load_or_create(Account, command.bank_account)
    customer = await tx.load_or_create(Account, command.customer)
    deposit = Deposit(command)
    add([deposit, *move(command.amount, bank_account, customer, deposit.id)], tx)
    return None


# All commands of a payment have the same consumer: between consumers there is no order. What a
# handler returns is stored with the inbox marker: `service inbox show` prints it. What is refused
# leaves no rows: they are created after the checks.
@handlers.on(
    AuthorizePayment,
    topic="payments",
    consumer="ledger",
    policy=IN_ORDER,
    loads=[Payment.by("payment_id"), Account.by("customer")],
)
async def authorize_payment(command: AuthorizePayment, tx: Transaction) -> Reason | None:
    """Reserve money, in an account that has the payment's id.

    The merchant's account is not locked, as many payments share it.
    """
    known = await tx.load(Payment, command.payment_id)
    customer = await tx.load(Account, command.customer)
    if known is not None:
        return refuse(command, "already authorized", known, tx)
    if customer is None or customer.balance < command.amount:
        return refuse(command, "insufficient funds", None, tx)
    payment, reserved = Payment(command), Account(command.payment_id)
    add([payment, reserved, *move(command.amount, customer, reserved, payment.id)], tx)
    tx.publish(PaymentAuthorized(**command.model_dump()), of=payment)
    return None


@handlers.on(
    CapturePayment,
    topic="payments",
    consumer="ledger",
    policy=IN_ORDER,
    loads=[
        Payment.by("payment_id"),
        Account.by("payment_id"),
        Account.by("customer"),
        Account.by("merchant"),
    ],
)
async def capture_payment(command: CapturePayment, tx: Transaction) -> Reason | None:
    """Give the merchant reserved money, and the customer the rest of it."""
    payment = await tx.load(Payment, command.payment_id)
    if payment is None:
        return refuse(command, "unknown authorization", None, tx)
    if reason := payment.capture(command):
        return refuse(command, reason, payment, tx)
    reserved = await tx.load_or_create(Account, command.payment_id)
    customer = await tx.load_or_create(Account, command.customer)
    merchant = await tx.load_or_create(Account, command.merchant)
    add(move(command.amount, reserved, merchant, payment.id), tx)
    returned = payment.authorized - payment.captured
    if returned > 0:
        add(move(returned, reserved, customer, payment.id), tx)
    captured = PaymentCaptured(payment_id=payment.id, amount=command.amount, returned=returned)
    tx.publish(captured, of=payment)
    return None


@handlers.on(
    RefundPayment,
    topic="payments",
    consumer="ledger",
    policy=IN_ORDER,
    loads=[
        Payment.by("payment_id"),
        Refund.by("refund_id"),
        Account.by("customer"),
        Account.by("merchant"),
    ],
)
async def refund_payment(command: RefundPayment, tx: Transaction) -> Reason | None:
    """Give the customer captured money back."""
    payment = await tx.load(Payment, command.payment_id)
    if payment is None:
        return refuse(command, "unknown authorization", None, tx)
    if await tx.load(Refund, command.refund_id) is not None:
        return refuse(command, "already refunded", payment, tx)
    if reason := payment.refund(command, await tx.load(Account, command.merchant)):
        return refuse(command, reason, payment, tx)
    customer = await tx.load_or_create(Account, command.customer)
    merchant = await tx.load_or_create(Account, command.merchant)
    refund = Refund(command.refund_id, payment.id, command.amount)
    add([refund, *move(command.amount, merchant, customer, payment.id)], tx)
    refunded = PaymentRefunded(
        payment_id=payment.id,
        refund_id=refund.id,
        amount=command.amount,
        refunded=payment.refunded,
    )
    tx.publish(refunded, of=payment)
    return None


def add(rows: Sequence[Base], tx: Transaction) -> None:
    """Insert rows when the batch is written."""
    for row in rows:
        tx.add(row)


def refuse(
    command: PaymentCommand, reason: Reason, payment: Payment | None, tx: Transaction
) -> Reason:
    """Publish that a command is refused, and return the reason."""
    refused = PaymentRefused(
        payment_id=command.payment_id,
        command=command.__event_type__,
        amount=command.amount,
        reason=reason,
        refund_id=command.refund_id if isinstance(command, RefundPayment) else None,
    )
    tx.publish(refused, of=payment, key=None if payment else command.payment_id)
    return reason
# <% if cookiecutter.http_api == "yes" %>


@handlers.on(RequestPayment, topic=None, consumer="answer-payment", loads=Account.by("customer"))
async def answer_payment(request: RequestPayment, tx: Transaction) -> dict[str, object]:
    """Authorize a payment that is requested by HTTP.

    Its id is made from the request's key. A repeat has the same id, even if the stored answer was
    deleted in the meantime; then it is answered with what is authorized.
    """
    payment_id = f"payment:{uuid5(uuid5(NAMESPACE_URL, tx.message.source), tx.message.id)}"
    payment = await tx.load(Payment, payment_id)
    if payment is not None:
        return {"payment_id": payment.id, "authorized": payment.authorized, "reason": None}
    command = AuthorizePayment(payment_id=payment_id, **request.model_dump())
    reason = await authorize_payment(command, tx)
    authorized = 0 if reason else command.amount
    return {"payment_id": payment_id, "authorized": authorized, "reason": reason}
# <% endif %>
# <% if cookiecutter.outside_calls == "yes" %>


@handlers.on(
    RequestPayout,
    topic="payments",
    consumer="ledger",
    policy=IN_ORDER,
    loads=[Account.by("payout_id"), Account.by("merchant")],
)
async def start_payout(
    command: RequestPayout, tx: Transaction, bank: Bank | None
) -> Reason | None:
    """Reserve the money, in an account that has the payout's id, and stage the bank's call."""
    if await tx.load(Account, command.payout_id) is not None:
        return "already requested"  # without an event: it may be made, so none may say "refused"
    merchant = await tx.load(Account, command.merchant)
    if merchant is None or merchant.balance < command.amount:
        return refuse_payout(command, "insufficient funds", None, tx)
    if bank is None:
        return refuse_payout(command, "no bank", None, tx)
    reserved = Account(command.payout_id)
    add([reserved, *move(command.amount, merchant, reserved, command.payout_id)], tx)
    tx.call(command, of=reserved)
    return None


async def end_payout(command: RequestPayout, tx: Transaction, is_accepted: bool | None) -> None:
    """Move the money to the bank account, or back; None: `is_at_bank` has found the transfer."""
    reserved = await tx.load_or_create(Account, command.payout_id)
    if is_accepted is False:
        target = await tx.load_or_create(Account, command.merchant)
        refuse_payout(command, "refused by the bank", reserved, tx)
    else:
        target = await tx.load_or_create(Account, command.bank_account)
        made = PayoutMade(
            payout_id=command.payout_id, merchant=command.merchant, amount=command.amount
        )
        tx.publish(made, of=reserved)
    add(move(command.amount, reserved, target, command.payout_id), tx)


def refuse_payout(
    command: RequestPayout, reason: Reason, reserved: Account | None, tx: Transaction
) -> Reason:
    """Publish that a payout is refused, and return the reason."""
    refused = PayoutRefused(
        payout_id=command.payout_id,
        merchant=command.merchant,
        amount=command.amount,
        reason=reason,
    )
    tx.publish(refused, of=reserved, key=None if reserved else command.payout_id)
    return reason


async def is_at_bank(command: RequestPayout, call: Call, bank: Bank | None) -> bool:
    """Return whether the bank has the transfer.

    A request that is under way may still arrive. The bank knows it by its key then.
    """
    return await configured(bank).has(command.payout_id)


@effects.on(
    RequestPayout,
    consumer="pay-out",
    repeatable=False,  # the bank forgets keys: after a long outage it would pay twice
    ask=is_at_bank,
    then=end_payout,
    # Only what `then` usually changes: a lock of the merchant's row would delay its payments.
    loads=[Account.by("payout_id"), Account.by("bank_account")],
)
async def pay_out(command: RequestPayout, call: Call, bank: Bank | None) -> bool:
    """Send the transfer to the bank; return whether it is accepted."""
    reference, to = command.payout_id, command.bank_account
    return await configured(bank).transfer(reference, to, command.amount, key=call.id)


def configured(bank: Bank | None) -> Bank:
    """Return the bank. Without one, calls that are staged wait for it."""
    if bank is None:
        raise Retry("BANK_URL is not set")
    return bank
# <% endif %>
# <% endif %>
