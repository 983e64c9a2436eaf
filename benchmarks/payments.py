"""The load of `ledger`: commands of the payments example, and the check of what came of them."""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg  # type: ignore[import-untyped]

from benchmarks.check import require
from benchmarks.load import Record
from benchmarks.rig import Contestant, Rig, Site, connected, place_of
from demo.processes import bake

SERVICE = "payment-ledger"
"""Name of the service that is generated with the example, next to the parcel tracker."""
OURS = Contestant("ours", "benchmarks.ours_payments", service=SERVICE)
BARE_ORM = Contestant("bare-orm", "benchmarks.bare_payments", service=SERVICE)
CUSTOMERS = 5_000
MERCHANTS = 10
"""Those of a ledger. The first merchant has a third of the payments, the last one a thirtieth."""
FEW_CUSTOMERS = 50
"""Those of a batch of authorizations, whose accounts have an equal share."""
AUTHORIZE = "payment.authorize.v1"
CAPTURE = "payment.capture.v1"
REFUND = "payment.refund.v1"
REFUSED = "payment.refused.v1"
CHECKS = {
    "account": "account_balance_check",
    "entry": "entry_amount_check",
    "payment": "payment_amounts_check",
}
"""Name of the CHECK of each table."""
_BANK = "bank:benchmark"
_DEPOSIT = "deposit:benchmark"
_OPEN = 100
"""Payments whose commands are mixed."""
_MOST_CENTS = 10_000
_PARTLY, _TWICE, _REFUNDED = 0.1, 0.05, 0.2
"""Shares of payments that are captured in part, captured a second time, and refunded."""


class Command(NamedTuple):
    """A command, by its event type."""

    number: int
    type: str
    payment_id: str
    customer: str
    merchant: str
    amount: int

    @property
    def refund_id(self) -> str:
        """Return the id of the command's own, if it is a refund."""
        return f"refund:{self.number}"

    def record(self) -> Record:
        """Return key, payload and headers of the command's record."""
        headers = {
            "ce_specversion": "1.0",
            "ce_id": str(self.number),
            "ce_source": "/benchmarks/clients",
            "ce_type": self.type,
            "ce_time": "2026-01-01T00:00:00Z",
            "content-type": "application/json",
        }
        data = {
            "payment_id": self.payment_id,
            "customer": self.customer,
            "merchant": self.merchant,
            "amount": self.amount,
        }
        if self.type == REFUND:
            data["refund_id"] = self.refund_id
        return (
            self.payment_id.encode(),
            json.dumps(data).encode(),
            [(name, value.encode()) for name, value in headers.items()],
        )


class Row(NamedTuple):
    """A payment's row."""

    customer: str
    merchant: str
    authorized: int
    captured: int = 0
    refunded: int = 0


@dataclass
class Ledger:
    """What the tables and the topic of events hold, or must hold."""

    balances: Mapping[str, int]
    """By account."""
    payments: Mapping[str, Row]
    events: Mapping[str, Sequence[tuple[str, int]]]
    """Type and amount of each event, by payment, in order."""
    refunds: Mapping[str, tuple[str, int]]
    """Payment and amount of each refund, by its id."""
    entries: Mapping[str, int]
    """Number of entries, by reference."""


@dataclass(frozen=True)
class Payments:
    """Commands of many payments. Each payment's are in order, and each publishes one event."""

    commands: Sequence[Command]

    def records(self) -> Iterator[Record]:
        """Yield the records of the commands."""
        return (one.record() for one in self.commands)

    @cached_property
    def deposits(self) -> Mapping[str, int]:
        """What each customer has first: enough for all authorizations, in whatever order."""
        deposits = Counter[str]()
        for one in self.commands:
            deposits[one.customer] += one.amount if one.type == AUTHORIZE else 0
        return deposits

    def funding(self) -> Iterable[str]:
        """Yield the statements that add the deposits, and the accounts of the merchants.

        A contestant that is protected by its transaction alone can't survive that two transactions
        create the same account.
        """
        balances = {_BANK: -sum(self.deposits.values()), **self.deposits}
        balances |= {one.merchant: 0 for one in self.commands}
        rows = ", ".join(f"('{id}', {balance}, 0)" for id, balance in balances.items())
        yield f"INSERT INTO account (id, balance, version) VALUES {rows}"
        yield (
            "INSERT INTO entry (account_id, amount, reference)"
            f" SELECT id, balance, '{_DEPOSIT}' FROM account WHERE balance <> 0"
        )

    @cached_property
    def ledger(self) -> Ledger:
        """What the commands must make of the deposits, in whatever order payments are handled."""
        balances = Counter[str]({**self.deposits, _BANK: -sum(self.deposits.values())})
        payments: dict[str, Row] = {}
        events = defaultdict[str, list[tuple[str, int]]](list)
        refunds: dict[str, tuple[str, int]] = {}
        entries = Counter[str]({_DEPOSIT: len(balances)})

        def move(amount: int, source: str, target: str) -> None:
            balances[source] -= amount
            balances[target] += amount
            entries[payment_id] += 2

        for one in self.commands:
            _, type, payment_id, customer, merchant, amount = one
            payment = payments.get(payment_id, Row(customer, merchant, amount))
            balances[merchant] += 0
            event = type.replace("authorize", "authorized").replace("capture", "captured")
            if type == AUTHORIZE:
                move(amount, customer, payment_id)
            elif type == CAPTURE and payment.captured:
                event = REFUSED
            elif type == CAPTURE:
                payment = payment._replace(captured=amount)
                move(amount, payment_id, merchant)
                if rest := payment.authorized - amount:
                    move(rest, payment_id, customer)
            else:
                payment = payment._replace(refunded=payment.refunded + amount)
                event = "payment.refunded.v1"
                refunds[one.refund_id] = payment_id, amount
                move(amount, merchant, customer)
            payments[payment_id] = payment
            events[payment_id].append((event, amount))
        return Ledger(balances, payments, events, refunds, entries)


def make(count: int, *, seed: int = 1) -> Payments:
    """Return so many commands of payments of many customers to merchants of unequal size."""
    chance = random.Random(seed)
    commands: list[Command] = []
    shares = [1 / (1 + n) for n in range(MERCHANTS)]

    def merchant() -> int:
        return chance.choices(range(MERCHANTS), shares)[0]

    payments = _payments(chance, partial(chance.randrange, CUSTOMERS), merchant)
    mixed = [next(payments) for _ in range(_OPEN)]
    while len(commands) < count:
        place = chance.randrange(_OPEN)
        type, *cells = mixed[place].pop(0)
        commands.append(Command(len(commands), type, *cells))
        if not mixed[place]:
            mixed[place] = next(payments)
    return Payments(commands)


def authorizations(count: int, *, seed: int = 1) -> Payments:
    """Return so many authorizations, each of another payment."""
    chance = random.Random(seed)
    accounts = (partial(chance.randrange, number) for number in (FEW_CUSTOMERS, MERCHANTS))
    firsts = (commands[0] for commands in _payments(chance, *accounts))
    return Payments([Command(number, *next(firsts)) for number in range(count)])


def _payments(
    chance: random.Random, customer: Callable[[], int], merchant: Callable[[], int]
) -> Iterator[list[Any]]:
    """Yield the commands of payment after payment, of customers and merchants by their numbers."""
    number = 0
    while True:
        number += 1
        accounts = f"customer:{customer():02}", f"merchant:{merchant()}"
        amount = captured = chance.randint(2, _MOST_CENTS)
        if chance.random() < _PARTLY:
            captured = chance.randint(1, amount - 1)
        amounts = [(AUTHORIZE, amount), (CAPTURE, captured)]
        if chance.random() < _TWICE:
            amounts.append((CAPTURE, captured))
        if chance.random() < _REFUNDED:
            amounts.append((REFUND, chance.randint(1, captured)))
        yield [(type, f"payment:{number:06}", *accounts, cents) for type, cents in amounts]


async def generate(folder: Path) -> None:
    """Generate the service into a folder. Raises `ProcessFailed`."""
    await bake(folder, folder / "bake.txt", SERVICE, worked_example="payments")


def without(contestant: Contestant, *parts: str) -> Contestant:
    """Return a contestant whose example lacks parts: entries, CHECK."""
    return replace(contestant, settings={"BENCH_WITHOUT": " ".join(parts)})


async def prepare(rig: Rig, site: Site, load: Payments) -> None:
    """Add the deposits; remove CHECK from the tables if the contestant is to be without."""
    if "CHECK" in removed(site.contestant):
        await rig.execute(
            *(f"ALTER TABLE {table} DROP CONSTRAINT {name}" for table, name in CHECKS.items()),
            database=site.database,
        )
    await rig.execute(*load.funding(), database=site.database)


def removed(contestant: Contestant) -> Collection[str]:
    """Return what a contestant's example lacks."""
    return contestant.settings.get("BENCH_WITHOUT", "").split()


async def check(rig: Rig, site: Site, load: Payments) -> None:
    """Compare tables, markers and events with the load. Raises `CheckFailed`."""
    events = defaultdict[str, list[tuple[str, int]]](list)

    def note(record: Any) -> tuple[str, int, None]:
        key, sequence, _ = place_of(record)
        type = dict(record.headers)["ce_type"].decode()
        events[key].append((type, json.loads(record.value)["amount"]))
        return key, sequence, None

    published = await rig.read(site.output, note)
    async with connected(site.database) as connection:
        tables, entries = await read(connection)
    has_entries = "entries" not in removed(site.contestant)
    faults = [*unlike(load.ledger, replace(tables, events=events), has_entries=has_entries)]
    if has_entries:
        faults += unbalanced(tables.balances, entries)
    expected = Counter({id: len(told) for id, told in load.ledger.events.items()})
    faults += published.faults(expected, {}, {})
    if (markers := await rig.markers(site)) != len(load.commands):
        faults.append(f"{markers:,} messages are marked, it should be {len(load.commands):,}")
    require(faults, site.contestant.name)


async def read(connection: asyncpg.Connection) -> tuple[Ledger, Sequence[Mapping[str, Any]]]:
    """Return the ledger that the tables hold, without events, and its entries."""
    balances = dict(await connection.fetch("SELECT id, balance FROM account"))
    rows = await connection.fetch(
        "SELECT id, customer, merchant, authorized, captured, refunded FROM payment"
    )
    refunds = await connection.fetch("SELECT id, payment_id, amount FROM refund")
    entries = await connection.fetch("SELECT account_id, amount, reference FROM entry")
    found = Ledger(
        balances,
        {id: Row(*row) for id, *row in rows},
        {},
        {id: (payment, amount) for id, payment, amount in refunds},
        Counter(one["reference"] for one in entries),
    )
    return found, entries


def unlike(expected: Ledger, found: Ledger, *, has_entries: bool = True) -> Iterator[str]:
    """Yield the differences of two ledgers."""
    yield from _differing("the balance of", expected.balances, found.balances)
    yield from _differing("the row of", expected.payments, found.payments)
    yield from _differing("the events of", expected.events, found.events)
    yield from _differing("the refund", expected.refunds, found.refunds)
    if has_entries:
        yield from _differing("the number of entries of", expected.entries, found.entries)


def unbalanced(balances: Mapping[str, int], entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the sums of the ledger that are wrong."""
    accounts, references = Counter[str](), Counter[str]()
    for entry in entries:
        accounts[entry["account_id"]] += entry["amount"]
        references[entry["reference"]] += entry["amount"]
    if total := sum(balances.values()):
        yield f"the ledger sums to {total:,}, it should be 0"
    yield from (f"{one} sums to {total:,}" for one, total in references.items() if total)
    for account in sorted({*balances, *accounts}):
        if accounts[account] != balances.get(account):
            yield f"{account} has {balances.get(account)}, its entries sum to {accounts[account]}"


def _differing(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            yield f"{what} {key} is {found.get(key)}, it should be {expected.get(key)}"
