"""What payments know, without servers."""

from <<cookiecutter.package_name>>.events import (
    AuthorizePayment,
    CapturePayment,
    Reason,
    RefundPayment,
)
from <<cookiecutter.package_name>>.tables import Account, Payment, move

ADA = "customer:ada"
BOOKS = "merchant:books"


class Rows:
    """A payment of 500, and its merchant, who has 1,000 from others."""

    def __init__(self) -> None:
        self.payment = Payment(
            AuthorizePayment(payment_id="payment:1", customer=ADA, merchant=BOOKS, amount=500)
        )
        self.merchant = Account(BOOKS)
        self.merchant.balance = 1_000

    def capture(self, amount: int, merchant: str = BOOKS) -> Reason | None:
        command = CapturePayment(
            payment_id="payment:1", customer=ADA, merchant=merchant, amount=amount
        )
        return self.payment.capture(command)

    def refund(self, amount: int, customer: str = ADA) -> Reason | None:
        command = RefundPayment(
            payment_id="payment:1",
            refund_id="refund:1",
            customer=customer,
            merchant=BOOKS,
            amount=amount,
        )
        return self.payment.refund(command, self.merchant)

    @property
    def amounts(self) -> tuple[int, int, int]:
        """Return what is authorized, captured and refunded."""
        return self.payment.authorized, self.payment.captured, self.payment.refunded


def test_a_movement_has_two_entries_that_add_up_to_0() -> None:
    source, target = Account("bank:at-1"), Account(ADA)
    entries = move(100, source, target, "deposit:1")
    assert [(one.account_id, one.amount) for one in entries] == [("bank:at-1", -100), (ADA, 100)]
    assert (source.balance, target.balance) == (-100, 100)


def test_a_payment_is_captured_once_and_refunded_in_parts() -> None:
    rows = Rows()
    assert rows.capture(400) is rows.refund(150) is rows.refund(250) is None
    assert rows.amounts == (500, 400, 400)


def test_what_is_refused_changes_nothing() -> None:
    rows = Rows()
    assert rows.capture(501) == "more than authorized"
    assert rows.refund(1) == "more than captured"
    assert rows.amounts == (500, 0, 0)
    rows.capture(400)
    assert rows.capture(1) == "already captured"
    rows.refund(300)
    assert rows.refund(101) == "more than captured"
    assert rows.amounts == (500, 400, 300)


def test_a_refund_needs_the_money_of_the_merchant() -> None:
    rows = Rows()
    rows.capture(500)
    rows.merchant.balance = 50
    assert rows.refund(51) == "insufficient funds"
    assert rows.refund(50) is None


def test_a_payment_belongs_to_one_customer_and_one_merchant() -> None:
    rows = Rows()
    assert rows.capture(500, merchant="merchant:shoes") == "unknown authorization"
    rows.capture(500)
    assert rows.refund(500, customer="customer:bob") == "unknown authorization"
    assert rows.amounts == (500, 500, 0)
