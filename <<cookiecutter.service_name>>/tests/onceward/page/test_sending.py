"""Messages that the page sends to the service, where it is allowed to."""

import asyncio
import html
import logging
import re
from collections.abc import AsyncIterator

import asyncpg
import httpx2
import pytest
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from onceward import Transaction
from onceward.apply.batch import read
from onceward.events.codec import Codec
from onceward.events.message import Message, Record
from onceward.plain import Header, PayloadFields, Plain, Position

from .conftest import TOKEN, Opened, csrf, log_in
from .test_many import hidden
from .test_page import HOSTILE, assert_harmless, recorded
from tests.contract.bank import Deposited
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank
from tests.onceward.integration.conftest import missing  # noqa: F401 (fixture)

_AUDIT = "SELECT who, action, subject, why FROM pipeline.audit ORDER BY id"


@pytest.fixture
async def sender(opened: Opened) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a page that sends messages, as Ann sees it."""
    async with opened(token=TOKEN, send=True) as client:
        await log_in(client)
        yield client


async def form_of(
    client: httpx2.AsyncClient, topic: str, type: str = "deposited"
) -> dict[str, str]:
    """Return the hidden fields of the form for an event."""
    answer = await client.get("/send", params={"what": f"{topic} {type}"})
    assert answer.status_code == 200, answer.text
    return hidden(answer.text)


async def records(kafka: str, topic: str) -> list[ConsumerRecord[bytes, bytes]]:
    """Return all records of a topic with one partition."""
    async with AIOKafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        ends = await consumer.end_offsets([partition])
        return [await asyncio.wait_for(consumer.getone(), 60) for _ in range(ends[partition])]


async def test_a_page_sends_nothing_unless_a_setting_allows_it(
    ann: httpx2.AsyncClient, bank: Bank, kafka: str
) -> None:
    assert "/send" not in (await ann.get("/")).text
    assert (await ann.get("/send")).status_code == 404
    form = {"csrf": await csrf(ann), "what": f"{bank.deposits} deposited", "payload.amount": "1"}
    assert (await ann.post("/send/message", data=form)).status_code == 404
    assert await records(kafka, bank.deposits) == []


async def test_a_form_with_an_example_is_sent_and_handled(
    sender: httpx2.AsyncClient,
    bank: Bank,
    applier: Applier,
    kafka: str,
    db: asyncpg.Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = (await sender.get("/send")).text
    assert f"<option>{bank.deposits} deposited</option>" in text
    text = (await sender.get("/send", params={"what": f"{bank.deposits} deposited"})).text
    example = dict(re.findall('<input name="payload.([^"]+)" value="([^"]*)"', text))
    assert example == {"account": "text", "amount": "1", "failures": "1"}
    filled = {"payload.account": "ada", "payload.amount": "7", "payload.failures": ""}
    caplog.set_level(logging.WARNING, "onceward.page")
    answer = await sender.post("/send/message", data=hidden(text) | filled)
    assert answer.status_code == 200, answer.text
    assert f"Sent to {bank.deposits}/0 at offset 0" in answer.text
    assert "and the key ada" in answer.text, "of the row that the handler loads"
    (id,) = re.findall("with the id <code>([0-9a-f-]{36})</code>", answer.text)
    assert 'name="payload.account" value="ada"' in answer.text, "to send another"
    (record,) = await records(kafka, bank.deposits)
    assert (record.key, record.value) == (b"ada", b'{"account": "ada", "amount": 7}')
    headers = dict(record.headers)
    assert (headers["ce_id"], headers["ce_type"]) == (id.encode(), b"deposited")
    await applier.position()
    await applier.apply_batch(await read(bank.handlers, 0, [record]))
    assert bank.calls == [7]
    audited = [tuple(row) for row in await db.fetch(_AUDIT)]
    assert audited == [("ann", "send", f"event {id} to topic {bank.deposits}", None)]
    assert recorded(caplog) == [
        (f"{what} on the page: send", "ann", f"{id} to {bank.deposits}")
        for what in ("requested", "done")
    ]


async def test_a_key_of_the_form_is_the_records_and_each_message_has_an_id_of_its_own(
    sender: httpx2.AsyncClient, bank: Bank, kafka: str
) -> None:
    form = await form_of(sender, bank.deposits)
    filled = {"payload.account": "ada", "payload.amount": "1", "key": "bob & eve"}
    for offset in range(2):
        answer = await sender.post("/send/message", data=form | filled)
        assert f"at offset {offset}," in answer.text
    found = await records(kafka, bank.deposits)
    assert [one.key for one in found] == [b"bob & eve"] * 2
    assert len({dict(one.headers)["ce_id"] for one in found}) == 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"payload.amount": "many"}, "the payload is invalid: ValidationError: amount: "),
        ({"payload.amount": ""}, "amount: Field required"),
    ],
    ids=["wrong", "missing"],
)
async def test_a_value_that_the_service_would_not_take_is_refused_with_the_name_of_its_field(
    sender: httpx2.AsyncClient,
    bank: Bank,
    kafka: str,
    db: asyncpg.Connection,
    changed: dict[str, str],
    said: str,
) -> None:
    form = await form_of(sender, bank.deposits)
    form |= {"payload.account": "ada", "payload.amount": "1", **changed}
    answer = await sender.post("/send/message", data=form)
    assert answer.status_code == 409
    assert said in answer.text
    assert 'name="payload.account" value="ada"' in answer.text, "it stays filled in"
    assert await records(kafka, bank.deposits) == []
    assert await db.fetch(_AUDIT) == []


async def test_only_a_form_of_a_person_who_is_logged_in_is_sent(
    opened: Opened, sender: httpx2.AsyncClient, bank: Bank, kafka: str
) -> None:
    filled = {"payload.account": "ada", "payload.amount": "1"}
    form = await form_of(sender, bank.deposits) | filled
    assert (await sender.post("/send/message", data=form | {"csrf": "x"})).status_code == 403
    origin = {"origin": "https://evil.test"}
    assert (await sender.post("/send/message", data=form, headers=origin)).status_code == 403
    async with opened(token=TOKEN, send=True) as anybody:
        for answer in (
            await anybody.get("/send"),
            await anybody.post("/send/message", data=form),
        ):
            assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert await records(kafka, bank.deposits) == []


@pytest.mark.parametrize("what", ["x", "elsewhere deposited", HOSTILE, "%00"])
async def test_only_events_that_the_service_takes_are_sent(
    sender: httpx2.AsyncClient, what: str
) -> None:
    form = {"csrf": await csrf(sender, "/send"), "what": what}
    for answer in (
        await sender.get("/send", params={"what": what}),
        await sender.post("/send/message", data=form),
    ):
        assert answer.status_code == 409
        assert "choose an event" in answer.text
        if what == HOSTILE:
            assert_harmless(answer.text)


async def test_what_is_hostile_is_sent_and_shown_as_text(
    sender: httpx2.AsyncClient, bank: Bank, kafka: str
) -> None:
    form = await form_of(sender, bank.deposits)
    answer = await sender.post(
        "/send/message", data=form | {"payload.account": HOSTILE, "payload.amount": "1"}
    )
    assert answer.status_code == 200
    assert_harmless(answer.text)
    (record,) = await records(kafka, bank.deposits)
    assert record.key == HOSTILE.encode()


@pytest.mark.parametrize(
    ("identity", "second"),
    [
        (Header("Message-Id"), r'\["deposited","[0-9a-f-]{36}"\]'),
        (PayloadFields("account", "amount"), r'\["deposited","ada",2\]'),
        (Position(), "0-1"),
    ],
    ids=["header", "payload", "position"],
)
async def test_a_record_has_the_form_of_its_topics_codec(
    sender: httpx2.AsyncClient,
    bank: Bank,
    applier: Applier,
    kafka: str,
    identity: Header | PayloadFields | Position,
    second: str,
) -> None:
    bank.handlers.topic(bank.deposits, codec=Plain("deposited", identity))
    form = await form_of(sender, bank.deposits) | {"payload.account": "ada"}
    answers = [
        (await sender.post("/send/message", data=form | {"payload.amount": amount})).text
        for amount in ("1", "2")
    ]
    (id,) = re.findall("with the id <code>([^<]+)</code>", answers[1])
    assert re.fullmatch(second, html.unescape(id))
    found = await records(kafka, bank.deposits)
    assert all("ce_id" not in dict(one.headers) for one in found)
    await applier.position()
    await applier.apply_batch(await read(bank.handlers, 0, found))
    assert bank.calls == [1, 2]


class Reading(Codec):
    """A codec that only reads."""

    def decode(self, record: Record, *, hash: bytes | None = None) -> Message:
        raise NotImplementedError


async def test_a_codec_that_writes_nothing_is_named(
    sender: httpx2.AsyncClient, bank: Bank, kafka: str
) -> None:
    bank.handlers.topic(bank.deposits, codec=Reading())  # type: ignore[abstract]  # as it only reads
    form = await form_of(sender, bank.deposits)
    filled = {"payload.account": "ada", "payload.amount": "1"}
    answer = await sender.post("/send/message", data=form | filled)
    assert answer.status_code == 409
    assert "Reading can&#39;t write the event" in answer.text
    assert await records(kafka, bank.deposits) == []


async def test_brokers_that_do_not_answer_and_a_topic_that_is_missing_are_named(
    opened: Opened,
    sender: httpx2.AsyncClient,
    bank: Bank,
    missing: str,  # noqa: F811
    unused_tcp_port: int,
) -> None:
    @bank.handlers.on(Deposited, topic=missing, consumer="other")
    async def other(event: Deposited, tx: Transaction) -> None:
        """Take it."""

    filled = {"payload.account": "ada", "payload.amount": "1"}
    form = await form_of(sender, missing) | filled
    answer = await sender.post("/send/message", data=form)
    assert answer.status_code == 409
    assert "has not acknowledged the message: UnknownTopicOrPartitionError" in answer.text
    away = f"127.0.0.1:{unused_tcp_port}"
    async with opened(token=TOKEN, send=True, brokers=away) as client:
        await log_in(client)
        form = await form_of(client, bank.deposits) | filled
        answer = await client.post("/send/message", data=form)
    assert answer.status_code == 409
    assert f"Refused: Kafka at {away} has not acknowledged the message" in answer.text
