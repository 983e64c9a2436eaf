"""What commands do to the ledger. A pattern for the tests of your own handlers with money."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError

from onceward import Event
from onceward.testing import Harness

from <<cookiecutter.package_name>>.events import (
    AuthorizePayment,
    CapturePayment,
    DepositReceived,
    PaymentAuthorized,
    PaymentCaptured,
    PaymentCommand,
    PaymentRefunded,
    PaymentRefused,
    Reason,
    RefundPayment,
)
from <<cookiecutter.package_name>>.tables import Account, Base, Entry, Payment, Refund, move

ADA = "customer:ada"
BOOKS = "merchant:books"


def deposit(amount: int, id: str = "deposit:1") -> DepositReceived:
    return DepositReceived(deposit_id=id, bank_account="bank:at-1", customer=ADA, amount=amount)


def authorize(amount: int, payment_id: str = "payment:1") -> AuthorizePayment:
    return AuthorizePayment(payment_id=payment_id, customer=ADA, merchant=BOOKS, amount=amount)


def capture(amount: int, payment_id: str = "payment:1") -> CapturePayment:
    return CapturePayment(payment_id=payment_id, customer=ADA, merchant=BOOKS, amount=amount)


def refund(amount: int, id: str = "refund:1") -> RefundPayment:
    return RefundPayment(
        payment_id="payment:1", refund_id=id, customer=ADA, merchant=BOOKS, amount=amount
    )


async def fund(harness: Harness, account: str, amount: int) -> None:
    """Give an account money, without a message."""
    async with harness.session() as session:
        rows = Account("bank:at-1"), Account(account)
        entries = move(amount, *rows, "deposit:0")
        session.add_all([*rows, *entries])


async def balance(harness: Harness, account: str) -> int:
    return (await harness.get(Account, account)).balance


async def ledger_is_balanced(harness: Harness) -> None:
    """Check that all entries add up to 0, and that balances and payments are what they say."""
    async with harness.session() as session:
        sums = select(Entry.account_id, func.sum(Entry.amount)).group_by(Entry.account_id)
        by_account = {account: int(amount) for account, amount in await session.execute(sums)}
        references = select(func.sum(Entry.amount)).group_by(Entry.reference)
        by_reference = [int(amount) for amount in await session.scalars(references)]
        accounts = {one.id: one for one in await session.scalars(select(Account))}
        payments = [*await session.scalars(select(Payment))]
        refunds = [*await session.scalars(select(Refund))]
    assert sum(by_account.values()) == 0
    assert not any(by_reference)
    assert {id: one.balance for id, one in accounts.items() if one.balance} == {
        account: amount for account, amount in by_account.items() if amount
    }
    assert all(one.balance >= 0 or id.startswith("bank:") for id, one in accounts.items())
    for payment in payments:
        assert 0 <= payment.refunded <= payment.captured <= payment.authorized
        is_open = payment.captured == 0
        assert accounts[payment.id].balance == (payment.authorized if is_open else 0)
        refunded = [one.amount for one in refunds if one.payment_id == payment.id]
        assert sum(refunded) == payment.refunded


async def rows(harness: Harness) -> dict[str, int]:
    """Count the rows of each table."""
    async with harness.session() as session:
        counts = {
            name: await session.scalar(select(func.count()).select_from(table))
            for name, table in Base.metadata.tables.items()
        }
    return {name: count or 0 for name, count in counts.items()}


async def test_a_payment_is_authorized_captured_and_refunded(harness: Harness) -> None:
    commands = [deposit(800), authorize(500), capture(400), refund(150)]
    outcome = await harness.handle_batch(commands)
    assert outcome.published == [
        PaymentAuthorized(payment_id="payment:1", customer=ADA, merchant=BOOKS, amount=500),
        PaymentCaptured(payment_id="payment:1", amount=400, returned=100),
        PaymentRefunded(payment_id="payment:1", refund_id="refund:1", amount=150, refunded=150),
    ]
    numbers = [(one.key, one.sequence) for one in outcome.records]
    assert numbers == [("payment:1", 1), ("payment:1", 2), ("payment:1", 3)]
    assert await balance(harness, ADA) == 550
    assert await balance(harness, BOOKS) == 250
    assert await balance(harness, "bank:at-1") == -800
    await ledger_is_balanced(harness)


REFUSED: list[tuple[list[Event], PaymentCommand, Reason]] = [
    ([deposit(499)], authorize(500), "insufficient funds"),
    ([deposit(800), authorize(500)], authorize(300), "already authorized"),
    ([deposit(800)], capture(500), "unknown authorization"),
    ([deposit(800), authorize(500)], capture(501), "more than authorized"),
    ([deposit(800), authorize(500), capture(400)], capture(100), "already captured"),
    ([deposit(800)], refund(500), "unknown authorization"),
    ([deposit(800), authorize(500)], refund(1), "more than captured"),
    ([deposit(800), authorize(500), capture(400)], refund(401), "more than captured"),
    ([deposit(800), authorize(500), capture(400), refund(100)], refund(100), "already refunded"),
    ([], authorize(500), "insufficient funds"),
    ([], capture(500), "unknown authorization"),
    ([], refund(500), "unknown authorization"),
]


@pytest.mark.parametrize(("before", "command", "reason"), REFUSED)
async def test_a_refusal_is_published_and_adds_no_rows(
    harness: Harness, before: list[Event], command: PaymentCommand, reason: Reason
) -> None:
    await harness.handle_batch(before)
    counts = await rows(harness)
    outcome = await harness.handle(command, id="of its own")
    assert outcome.failures == []
    assert outcome.published == [
        PaymentRefused(
            payment_id="payment:1",
            command=command.__event_type__,
            amount=command.amount,
            reason=reason,
            refund_id="refund:1" if isinstance(command, RefundPayment) else None,
        )
    ]
    (record,) = outcome.records
    is_known = authorize(500) in before
    assert (record.key, record.sequence is not None) == ("payment:1", is_known)
    assert await rows(harness) == counts
    await ledger_is_balanced(harness)


async def test_a_command_that_is_sent_twice_takes_effect_once(harness: Harness) -> None:
    for event in (deposit(800), authorize(500), capture(500), refund(100)):
        assert not (await harness.handle(event)).is_duplicate
        again = await harness.handle(event)
        assert again.is_duplicate
        assert again.published == []
    assert await balance(harness, ADA) == 400
    await ledger_is_balanced(harness)


async def test_a_command_repeated_with_another_event_id_takes_effect_once(
    harness: Harness,
) -> None:
    once = [deposit(800), authorize(500), capture(500), refund(100)]
    for number in range(3):
        for event in once:
            await harness.handle(event, id=f"{event.__event_type__} {number}")
    assert await balance(harness, ADA) == 400
    again = await harness.handle(deposit(800), id="again")
    assert (again.results, again.published) == (["already deposited"], [])
    assert (await harness.handle(refund(100, "refund:2"))).published == [
        PaymentRefunded(payment_id="payment:1", refund_id="refund:2", amount=100, refunded=200)
    ]
    await ledger_is_balanced(harness)


@asynccontextmanager
async def locked(harness: Harness, account: str) -> AsyncIterator[None]:
    """Lock an account for the time of a block, as another handler that has loaded it."""
    async with harness.session() as session:
        row = select(Account).where(Account.id == account).with_for_update(key_share=True)
        assert await session.scalar(row) is not None
        yield


async def test_an_authorization_does_not_wait_for_the_account_of_its_merchant(
    harness: Harness,
) -> None:
    await fund(harness, BOOKS, 1)
    await harness.handle(deposit(800))
    async with locked(harness, BOOKS):
        (published,) = (await harness.handle(authorize(500))).published
        assert isinstance(published, PaymentAuthorized)


async def test_two_payments_can_not_spend_the_same_money(harness: Harness) -> None:
    await harness.handle(deposit(800))
    both = [authorize(500, "payment:1"), authorize(500, "payment:2")]
    first, second = (await harness.handle_batch(both)).published
    assert isinstance(first, PaymentAuthorized)
    assert isinstance(second, PaymentRefused)
    assert second.reason == "insufficient funds"


@pytest.mark.parametrize("change", [{"amount": 900}, {"customer": "customer:bob"}])
async def test_another_deposit_under_an_id_that_was_used_is_a_dead_letter(
    harness: Harness, change: dict[str, object]
) -> None:
    await harness.handle(deposit(800))
    await harness.handle(deposit(800).model_copy(update=change))
    (letter,) = await harness.dead_letters()
    assert letter.reason == "rejected"
    assert await balance(harness, ADA) == 800
    await ledger_is_balanced(harness)


async def test_a_dead_command_holds_those_behind_it_of_its_payment_alone(harness: Harness) -> None:
    await harness.handle(deposit(800))
    type = AuthorizePayment.__event_type__
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/shop", "ce_type": type}
    nothing = authorize(500).model_dump_json().replace("500", "0")
    await harness.handle_record("payments", nothing, key="payment:1", headers=headers)
    assert (await harness.handle(capture(500))).published == []
    assert len((await harness.handle(authorize(500, "payment:2"))).published) == 1
    (letter,) = await harness.dead_letters()
    assert letter.reason == "invalid payload"


@pytest.mark.parametrize(
    "change",
    [
        *({"amount": amount} for amount in (True, "7", " 9 ", 5.0, 0, -1, 10**15 + 1)),
        {"currency": "JPY"},
        {"customer": "merchant:books"},
        {"merchant": "merchant:" + 101 * "x"},
        {"merchant": "merchant:\x00"},
    ],
)
async def test_a_command_that_is_not_exactly_one_is_a_dead_letter(
    harness: Harness, change: dict[str, object]
) -> None:
    await harness.handle(deposit(800))
    type = AuthorizePayment.__event_type__
    headers = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/shop", "ce_type": type}
    payload = json.dumps(authorize(500).model_dump() | change)
    await harness.handle_record("payments", payload, key="payment:1", headers=headers)
    (letter,) = await harness.dead_letters()
    assert letter.reason == "invalid payload"
    assert await balance(harness, ADA) == 800


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entry SET amount = 1",
        "DELETE FROM entry",
        "INSERT INTO entry (account_id, amount, reference) VALUES ('customer:ada', 0, 'nothing')",
    ],
)
async def test_entries_are_only_added_and_each_changes_a_balance(
    harness: Harness, statement: str
) -> None:
    await harness.handle(deposit(800))
    with pytest.raises(DBAPIError, match=r"rows of entry are only added|entry_amount_check"):
        async with harness.session() as session:
            await session.execute(text(statement))
    await ledger_is_balanced(harness)


async def test_the_ledger_is_balanced_in_whatever_way_commands_come(harness: Harness) -> None:
    async def each_is_answered(harness: Harness) -> None:
        await ledger_is_balanced(harness)
        assert len(await harness.records()) == 4

    # Whether the deposit comes first decides which of them are refused.
    commands = [deposit(800), authorize(500), capture(400), refund(400)]
    commands += [authorize(500, "payment:2")]
    await harness.explore(commands, invariant=each_is_answered, at_most=30)
    await harness.explore(commands, invariant=each_is_answered, crashes=True, at_most=4)


async def test_a_payment_is_made_once_wherever_the_process_dies(harness: Harness) -> None:
    async for crash in harness.each_crash():
        await fund(harness, ADA, 800)
        await harness.handle_batch([authorize(500), capture(500)])
        assert await balance(harness, BOOKS) == 500, crash
        await ledger_is_balanced(harness)
