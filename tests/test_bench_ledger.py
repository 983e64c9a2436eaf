"""The measure `ledger`: its load is a ledger, its check can fail, and the page has its figures."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import payments
from benchmarks.bench import Run
from benchmarks.measures.ledger import SIDES
from benchmarks.payments import BARE_ORM
from benchmarks.work import partition_of

from tests.test_bench import cells_of, page_with


def test_payments_are_mixed_and_few_commands_are_refused() -> None:
    made = payments.make(2_000)
    assert payments.make(2_000) == made
    assert len({one.customer for one in made.commands}) > 500
    merchants = Counter(one.merchant for one in made.commands)
    assert len(merchants) == payments.MERCHANTS
    assert merchants["merchant:0"] > 5 * merchants["merchant:9"]
    types = Counter(one.type for one in made.commands)
    assert min(types.values()) > 100
    pairs = zip(made.commands, made.commands[1:], strict=False)
    assert sum(one.payment_id == other.payment_id for one, other in pairs) < 100
    told = Counter(type for events in made.ledger.events.values() for type, _ in events)
    assert told.total() == len(made.commands)
    assert 0 < told[payments.REFUSED] < 100
    partitions = Counter(partition_of(one.payment_id.encode(), 4) for one in made.commands)
    assert min(partitions.values()) > 400


def test_authorizations_are_of_payments_of_their_own() -> None:
    made = payments.authorizations(600)
    assert {one.type for one in made.commands} == {payments.AUTHORIZE}
    assert len({one.payment_id for one in made.commands}) == 600
    assert len(made.ledger.balances) == 600 + payments.FEW_CUSTOMERS + payments.MERCHANTS + 1
    assert sum(made.ledger.balances.values()) == 0


def test_a_load_of_payments_is_a_ledger_and_its_deposits_last() -> None:
    made = payments.make(2_000)
    balances = made.ledger.balances
    assert sum(balances.values()) == 0
    assert sum(made.deposits.values()) == sum(
        one.amount for one in made.commands if one.type == payments.AUTHORIZE
    )
    assert [id for id, balance in balances.items() if balance < 0] == ["bank:benchmark"]
    rows = made.ledger.payments.values()
    assert all(0 <= one.refunded <= one.captured <= one.authorized for one in rows)
    assert any(0 < one.captured < one.authorized for one in rows)


PAYMENT = next(id for id, row in payments.make(200).ledger.payments.items() if row.refunded)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        pytest.param("balances", lambda one: one + 1, "the balance of", id="a cent too much"),
        pytest.param("balances", None, "the balance of", id="an account is missing"),
        pytest.param("payments", lambda one: one._replace(captured=0), "the row of", id="captured"),
        pytest.param("payments", lambda one: one._replace(refunded=0), "the row of", id="refunded"),
        pytest.param("payments", None, "the row of", id="a payment is missing"),
        pytest.param("events", lambda one: one[::-1], "the events of", id="reordered"),
        pytest.param("events", lambda one: one[:-1], "the events of", id="an event is missing"),
        pytest.param("entries", lambda one: one + 2, "the number of entries of", id="moved twice"),
        pytest.param("entries", None, "the number of entries of", id="entries are missing"),
    ],
)
def test_a_ledger_that_is_not_as_the_load_says_fails_the_check(
    kind: str, change: Callable[[Any], Any] | None, said: str
) -> None:
    right = payments.make(200).ledger
    assert list(payments.unlike(right, payments.make(200).ledger)) == []
    part = dict(getattr(right, kind))
    if change is None:
        del part[PAYMENT]
    else:
        part[PAYMENT] = change(part[PAYMENT])
    (fault,) = payments.unlike(right, replace(right, **{kind: part}))
    assert fault.startswith(f"{said} {PAYMENT} is ")


def test_a_refund_that_is_missing_fails_the_check() -> None:
    right = payments.make(200).ledger
    id, *_ = right.refunds
    others = {one: refund for one, refund in right.refunds.items() if one != id}
    (fault,) = payments.unlike(right, replace(right, refunds=others))
    assert fault.startswith(f"the refund {id} is None, it should be ('payment:")


@pytest.mark.parametrize(
    ("balances", "amounts", "said"),
    [
        pytest.param({"a": -5, "b": 5}, [-5, 5], "", id="as it should be"),
        pytest.param({"a": -5, "b": 6}, [-5, 5], "the ledger sums to 1", id="money appeared"),
        pytest.param({"a": -5, "b": 5}, [-5, 4], "one sums to -1", id="half an entry"),
        pytest.param({"a": -6, "b": 6}, [-5, 5], "b has 6, its entries sum to 5", id="no entries"),
        pytest.param({"a": -5}, [-5, 5], "b has None, its entries sum to 5", id="no account"),
    ],
)
def test_a_ledger_sums_to_zero_and_balances_are_sums_of_entries(
    balances: dict[str, int], amounts: list[int], said: str
) -> None:
    entries = [
        {"account_id": account, "amount": amount, "reference": "one"}
        for account, amount in zip("ab", amounts, strict=True)
    ]
    found = "; ".join(payments.unbalanced(balances, entries))
    assert said in found if said else found == ""


def test_the_page_says_what_a_ledger_costs() -> None:
    bare = {"rate": 2_000.0, "per_cpu": 2_500.0, "cpu_python": 0.3, "cpu_postgres": 0.1}
    ours = {"rate": 800.0, "per_cpu": 1_000.0, "cpu_python": 0.75, "cpu_postgres": 0.25}
    cells = {
        True: ["2,000", "2,500", "", "300", "100"],
        False: ["800", "1,000", "0.4", "750", "250"],
    }
    is_bare = {one.name: one.contestant is BARE_ORM for one in SIDES}
    runs = [Run("ledger", who, 1, bare if is_bare[who] else ours) for who in is_bare]
    page = page_with("ledger", runs)
    for who in is_bare:
        assert cells[is_bare[who]] in cells_of(page, who)
