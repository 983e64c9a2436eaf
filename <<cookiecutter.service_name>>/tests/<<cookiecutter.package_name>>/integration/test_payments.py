"""What commands do, from Kafka to Kafka. A pattern for tests of the service as a whole."""

import json
from collections.abc import Awaitable, Callable

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer

from onceward import Event

from <<cookiecutter.package_name>>.events import AuthorizePayment, CapturePayment, DepositReceived

from .conftest import Published, RunningService
from tests.servers.topics import Rename
from tests.servers.waiting import eventually

pytestmark = pytest.mark.integration

ADA = "customer:ada"
BOOKS = "merchant:books"

Send = Callable[..., Awaitable[None]]


@pytest.fixture
def send(producer: AIOKafkaProducer, topics: Rename) -> Send:
    """Send an event with this key, as other services do."""

    async def send(event: Event, key: str) -> None:
        await producer.send_and_wait(
            topics("payments"),
            event.model_dump_json().encode(),
            key=key.encode(),
            headers=[
                ("ce_specversion", b"1.0"),
                ("ce_id", f"{event.__event_type__} {key}".encode()),
                ("ce_source", b"/shop"),
                ("ce_type", event.__event_type__.encode()),
                ("content-type", b"application/json"),
            ],
        )

    return send


def deposit(customer: str, amount: int) -> DepositReceived:
    return DepositReceived(
        deposit_id=f"deposit:{customer}", bank_account="bank:at-1", customer=customer, amount=amount
    )


async def test_payments_of_many_customers_to_one_merchant_move_their_money_once(
    running_service: RunningService,
    send: Send,
    db: asyncpg.Connection,
    published: Published,
) -> None:
    customers = [f"customer:{number}" for number in range(20)]

    async def are_all_deposited() -> bool:
        count = await db.fetchval("SELECT count(*) FROM account WHERE balance > 0")
        return bool(count == len(customers))

    async with running_service():
        for customer in customers:
            await send(deposit(customer, 1_000), customer)
        # Another partition than the deposit's: without this wait, a payment could be first.
        await eventually(are_all_deposited)
        for number, customer in enumerate(customers):
            payment = f"payment:{number}"
            fields = {"payment_id": payment, "customer": customer, "merchant": BOOKS}
            authorization = AuthorizePayment.model_validate(fields | {"amount": 700})
            for _ in range(2):
                await send(authorization, payment)
            await send(CapturePayment.model_validate(fields | {"amount": 600}), payment)
        for number in range(len(customers)):
            events = await published("payment-events", f"payment:{number}", 2)
            amounts = [json.loads(event.value)["amount"] for event in events]
            assert amounts == [700, 600]
    balances = dict(await db.fetch("SELECT id, balance FROM account WHERE balance <> 0"))
    assert balances == {
        BOOKS: 12_000,
        "bank:at-1": -20_000,
        **dict.fromkeys(customers, 400),
    }
    sums = dict(await db.fetch("SELECT account_id, sum(amount)::bigint FROM entry GROUP BY 1"))
    assert {account: amount for account, amount in sums.items() if amount} == balances
    assert sum(sums.values()) == 0
