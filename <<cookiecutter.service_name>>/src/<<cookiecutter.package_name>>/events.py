"""The events that the service consumes and publishes."""
# <%- if cookiecutter.worked_example in ("parcels", "yes") +%>

from pydantic import AwareDatetime

from onceward import Event
# <%- elif cookiecutter.worked_example == "payments" +%>

from typing import Annotated, Literal

from pydantic import Field

from onceward import Event
# <%- endif +%>
# <%- if cookiecutter.worked_example in ("parcels", "yes") +%>


class ScanRecorded(Event, type="scan.recorded.v1"):
    """A scanner has seen a parcel. A scan is identified by its scanner and its number there."""

    scanner: str
    number: int
    parcel_id: str
    place: str
    scanned_at: AwareDatetime
    minutes_late: int | None = None


class ParcelMoved(Event, type="parcel.moved.v1", topic="parcel-events"):
    """A parcel was scanned; `scans` is the number of its scans so far."""

    parcel_id: str
    place: str
    scans: int
    scanner: str
    number: int


class ParcelDelayed(Event, type="parcel.delayed.v1", topic="parcel-events"):
    """A parcel is more than an hour late."""

    parcel_id: str
    minutes_late: int
    scanner: str
    number: int


# <%- elif cookiecutter.worked_example == "payments" +%>

# An account is named after what it is for, so that no payment can take a customer's name. All names
# fit into an index, and have no characters that PostgreSQL can't store.
CustomerId = Annotated[str, Field(pattern="^customer:[!-~]{1,100}$", examples=["customer:1"])]
MerchantId = Annotated[str, Field(pattern="^merchant:[!-~]{1,100}$", examples=["merchant:1"])]
PaymentId = Annotated[str, Field(pattern="^payment:[!-~]{1,100}$", examples=["payment:1"])]
DepositId = Annotated[str, Field(pattern="^deposit:[!-~]{1,100}$", examples=["deposit:1"])]
RefundId = Annotated[str, Field(pattern="^refund:[!-~]{1,100}$", examples=["refund:1"])]
# <% if cookiecutter.outside_calls == "yes" %>
PayoutId = Annotated[str, Field(pattern="^payout:[!-~]{1,100}$", examples=["payout:1"])]
# <% endif %>
BankAccountId = Annotated[str, Field(pattern="^bank:[!-~]{1,100}$", examples=["bank:1"])]

Amount = Annotated[int, Field(strict=True, gt=0, le=10**15)]
"""Money in the smallest unit of the one currency (cents): integers add up exactly everywhere."""

Reason = Literal[
    "insufficient funds",
    "already deposited",
    "already authorized",
    "unknown authorization",
    "already captured",
    "more than authorized",
    "already refunded",
    "more than captured",
    # <% if cookiecutter.outside_calls == "yes" %>
    "already requested",
    "no bank",
    "refused by the bank",
    # <% endif %>
]
"""Why a command is refused. A refusal is no error: the command is handled."""


# Each command has an id that is the primary key of a row, so it takes effect once, also if it comes
# as another message. None has other fields: an ignored one, like a currency, could change it.
class DepositReceived(Event, type="deposit.received.v1", extra="forbid"):
    """Money of a customer has arrived from a bank. Its record has the customer's id as its key."""

    deposit_id: DepositId
    bank_account: BankAccountId
    customer: CustomerId
    amount: Amount


class AuthorizePayment(Event, type="payment.authorize.v1", extra="forbid"):
    """Reserve money of a customer for a merchant.

    The records of a payment's commands have its id as their key, so they stay in order. A merchant
    as the key would put all payments of a big one into one partition. Each command names all
    accounts that it changes, so that their rows can be locked before its handler runs.
    """

    payment_id: PaymentId
    customer: CustomerId
    merchant: MerchantId
    amount: Amount


class CapturePayment(Event, type="payment.capture.v1", extra="forbid"):
    """Give the merchant reserved money; the customer gets the rest back."""

    payment_id: PaymentId
    customer: CustomerId
    merchant: MerchantId
    amount: Amount


class RefundPayment(Event, type="payment.refund.v1", extra="forbid"):
    """Give the customer captured money back, all of it or a part."""

    refund_id: RefundId
    payment_id: PaymentId
    customer: CustomerId
    merchant: MerchantId
    amount: Amount


# <%- if cookiecutter.http_api == "yes" +%>


class RequestPayment(Event, type="payment.request.v1", extra="forbid"):
    """Authorize a payment that a client requests by HTTP. The service gives it an id."""

    customer: CustomerId
    merchant: MerchantId
    amount: Amount


# <%- endif +%>
# <%- if cookiecutter.outside_calls == "yes" +%>


class RequestPayout(Event, type="payout.request.v1", extra="forbid"):
    """Transfer money of a merchant to a bank account."""

    payout_id: PayoutId
    merchant: MerchantId
    bank_account: BankAccountId
    amount: Amount


# <%- endif +%>


PaymentCommand = AuthorizePayment | CapturePayment | RefundPayment


# <%- if cookiecutter.outside_calls == "yes" +%>


class PayoutMade(Event, type="payout.made.v1", topic="payment-events"):
    """The bank has accepted the transfer."""

    payout_id: str
    merchant: str
    amount: int


class PayoutRefused(Event, type="payout.refused.v1", topic="payment-events"):
    """The merchant has kept the money, or has it back."""

    payout_id: str
    merchant: str
    amount: int
    reason: Reason


# <%- endif +%>


class PaymentAuthorized(Event, type="payment.authorized.v1", topic="payment-events"):
    """The amount is reserved."""

    payment_id: str
    customer: str
    merchant: str
    amount: int


class PaymentCaptured(Event, type="payment.captured.v1", topic="payment-events"):
    """The merchant has the amount, and the customer what was reserved beyond it."""

    payment_id: str
    amount: int
    returned: int


class PaymentRefunded(Event, type="payment.refunded.v1", topic="payment-events"):
    """The customer has the amount back; `refunded` is the sum of the payment's refunds so far."""

    payment_id: str
    refund_id: str
    amount: int
    refunded: int


class PaymentRefused(Event, type="payment.refused.v1", topic="payment-events"):
    """A command changed nothing; `command` is its type. A payment without a row has no sequence."""

    payment_id: str
    command: str
    amount: int
    reason: Reason
    refund_id: str | None


# <%- endif +%>
