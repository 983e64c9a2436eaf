"""The tables of the service, as SQLAlchemy maps them."""

# <% if cookiecutter.worked_example in ("parcels", "yes") %>
from datetime import datetime

from sqlalchemy import DateTime, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Aggregate

# <%- elif cookiecutter.worked_example == "payments" %>
from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKey, Identity, Text, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Aggregate

from .events import AuthorizePayment, CapturePayment, DepositReceived, Reason, RefundPayment

# <%- else %>
from sqlalchemy.orm import DeclarativeBase

# <%- endif +%>


class Base(DeclarativeBase):
    """Every table of the service derives from it, so that migrations see it."""


# <%- if cookiecutter.worked_example in ("parcels", "yes") +%>


class Parcel(Aggregate, Base):
    """Where a parcel is."""

    __tablename__ = "parcel"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    place: Mapped[str] = mapped_column(Text)
    scans: Mapped[int]
    last_scanned_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))

    def __init__(self, id: str) -> None:
        self.id = id
        self.place = ""
        self.scans = 0

    def move_to(self, place: str, scanned_at: datetime) -> None:
        """Count a scan. The place is that of the newest scan, which may have arrived earlier."""
        self.scans += 1
        if self.last_scanned_at is None or scanned_at >= self.last_scanned_at:
            self.place = place
            self.last_scanned_at = scanned_at


# <%- elif cookiecutter.worked_example == "payments" +%>


class Account(Aggregate, Base):
    """Money of a customer or a merchant, reserved for a payment, or at a bank.

    It is created by the first command that names it. A bank account is outside of the ledger: the
    money that came from there makes its balance negative.
    """

    __tablename__ = "account"
    __table_args__ = (
        CheckConstraint("balance >= 0 OR starts_with(id, 'bank:')", name="account_balance_check"),
    )

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    balance: Mapped[int] = mapped_column(BigInteger)

    def __init__(self, id: str) -> None:
        self.id = id
        self.balance = 0


class Entry(Base):
    """A change of an account's balance. A trigger refuses to change or delete rows."""

    __tablename__ = "entry"
    __table_args__ = (CheckConstraint("amount <> 0", name="entry_amount_check"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    account_id: Mapped[str] = mapped_column(ForeignKey("account.id"), index=True)
    amount: Mapped[int] = mapped_column(BigInteger)
    reference: Mapped[str] = mapped_column(Text)
    """Id of the deposit, payment or payout. The entries of a reference add up to 0."""
    added_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.current_timestamp()
    )

    def __init__(self, account: Account, amount: int, reference: str) -> None:
        self.account_id = account.id
        self.amount = amount
        self.reference = reference


def move(amount: int, source: Account, target: Account, reference: str) -> list[Entry]:
    """Move money from one account to another; return the two entries, which add up to 0."""
    source.balance -= amount
    target.balance += amount
    return [Entry(source, -amount, reference), Entry(target, amount, reference)]


class Deposit(Aggregate, Base):
    """Money that has arrived. Its id is the bank's, so no deposit is added twice."""

    __tablename__ = "deposit"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    customer: Mapped[str] = mapped_column(Text)
    amount: Mapped[int] = mapped_column(BigInteger)

    def __init__(self, command: DepositReceived) -> None:
        self.id = command.deposit_id
        self.customer = command.customer
        self.amount = command.amount


class Payment(Aggregate, Base):
    """How much of a payment is authorized, captured and refunded.

    Its methods return None, or the reason why they have changed nothing.
    """

    __tablename__ = "payment"
    __table_args__ = (
        CheckConstraint(
            "0 <= refunded AND refunded <= captured AND captured <= authorized",
            name="payment_amounts_check",
        ),
    )

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    # No foreign keys: the account of a new merchant is created by the first capture.
    customer: Mapped[str] = mapped_column(Text)
    merchant: Mapped[str] = mapped_column(Text)
    authorized: Mapped[int] = mapped_column(BigInteger)
    captured: Mapped[int] = mapped_column(BigInteger)
    refunded: Mapped[int] = mapped_column(BigInteger)

    def __init__(self, command: AuthorizePayment) -> None:
        self.id = command.payment_id
        self.customer = command.customer
        self.merchant = command.merchant
        self.authorized = command.amount
        self.captured = self.refunded = 0

    def capture(self, command: CapturePayment) -> Reason | None:
        """Capture the amount, once."""
        if (self.customer, self.merchant) != (command.customer, command.merchant):
            return "unknown authorization"
        if self.captured > 0:
            return "already captured"
        if command.amount > self.authorized:
            return "more than authorized"
        self.captured = command.amount
        return None

    def refund(self, command: RefundPayment, merchant: Account | None) -> Reason | None:
        """Refund the amount, which the merchant must still have."""
        if (self.customer, self.merchant) != (command.customer, command.merchant):
            return "unknown authorization"
        if command.amount > self.captured - self.refunded:
            return "more than captured"
        if merchant is None or command.amount > merchant.balance:
            return "insufficient funds"
        self.refunded += command.amount
        return None


class Refund(Aggregate, Base):
    """A part of a payment that was refunded. Its id is the command's: none is made twice."""

    __tablename__ = "refund"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    payment_id: Mapped[str] = mapped_column(ForeignKey("payment.id"))
    amount: Mapped[int] = mapped_column(BigInteger)

    def __init__(self, id: str, payment_id: str, amount: int) -> None:
        self.id = id
        self.payment_id = payment_id
        self.amount = amount


# <%- endif +%>
