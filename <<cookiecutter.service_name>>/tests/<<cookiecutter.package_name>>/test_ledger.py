"""What accounts and payments know, without servers."""

from <<cookiecutter.package_name>>.events import AuthorizePayment, Reason
from <<cookiecutter.package_name>>.tables import Account, Entry, Payment, move

ADA = "customer:ada"
BOOKS = "merchant:books"


class Rows:
    """The rows of a payment of 500 by a customer who has 800."""

    def __init__(self) -> None:
        self.payment = Payment("payment:1")
        self.customer = Account(ADA)
        self.merchant = Account(BOOKS)
        self.reserved = Account("payment:1")
        self.customer.balance = 800

    def authorize(self, amount: int) -> list[Entry] | Reason:
        command = AuthorizePayment(
            payment_id="payment:1", customer=ADA, merchant=BOOKS, amount=amount
        )
        return self.payment.authorize(command, self.customer, self.reserved)

    def capture(self, amount: int) -> list[Entry] | Reason:
        return self.payment.capture(amount, self.customer, self.merchant, self.reserved)

    def refund(self, amount: int) -> list[Entry] | Reason:
        return self.payment.refund(amount, self.customer, self.merchant)

    @property
    def balances(self) -> tuple[int, int, int]:
        """Return those of the customer, of what is reserved, and of the merchant."""
        return self.customer.balance, self.reserved.balance, self.merchant.balance


def amounts(entries: list[Entry] | Reason) -> list[tuple[str, int]]:
    assert isinstance(entries, list), entries
    return [(entry.account_id, entry.amount) for entry in entries]


def test_a_movement_has_two_entries_that_add_up_to_0() -> None:
    source, target = Account("bank:at-1"), Account(ADA)
    entries = move(100, source, target, "deposit-1")
    assert amounts(entries) == [("bank:at-1", -100), (ADA, 100)]
    assert (source.balance, target.balance) == (-100, 100)


def test_money_is_reserved_captured_and_refunded_and_the_rest_is_returned() -> None:
    rows = Rows()
    assert amounts(rows.authorize(500)) == [(ADA, -500), ("payment:1", 500)]
    assert rows.balances == (300, 500, 0)
    captured = [("payment:1", -400), (BOOKS, 400), ("payment:1", -100), (ADA, 100)]
    assert amounts(rows.capture(400)) == captured
    assert rows.balances == (400, 0, 400)
    assert amounts(rows.refund(150)) == [(BOOKS, -150), (ADA, 150)]
    assert rows.balances == (550, 0, 250)


def test_what_is_refused_changes_nothing() -> None:
    rows = Rows()
    assert rows.authorize(801) == "insufficient funds"
    assert rows.capture(1) == rows.refund(1) == "unknown authorization"
    assert rows.balances == (800, 0, 0)
    rows.authorize(500)
    assert rows.authorize(1) == "already authorized"
    assert rows.capture(501) == "more than authorized"
    assert rows.refund(1) == "more than captured"
    assert rows.balances == (300, 500, 0)
    rows.capture(400)
    assert rows.capture(1) == "already captured"
    rows.refund(300)
    assert rows.refund(101) == "more than captured"
    assert rows.balances == (700, 0, 100)


def test_a_refund_needs_the_money_of_the_merchant() -> None:
    rows = Rows()
    rows.authorize(500)
    rows.capture(500)
    move(450, rows.merchant, Account("payout:1"), "payout:1")
    assert rows.refund(51) == "insufficient funds"
    assert amounts(rows.refund(50)) == [(BOOKS, -50), (ADA, 50)]


def test_a_payment_belongs_to_one_customer_and_one_merchant() -> None:
    rows = Rows()
    rows.authorize(500)
    other = Account("merchant:shoes")
    refused = rows.payment.capture(500, rows.customer, other, rows.reserved)
    assert refused == "unknown authorization"
    assert rows.balances == (300, 500, 0)
