"""A payout reaches the bank over HTTP once, whatever that does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from <<cookiecutter.package_name>>.events import RequestPayout

from .conftest import RunningService
from .test_payments import BOOKS, Send, send  # noqa: F401 (a fixture)
from tests.servers.waiting import eventually

pytestmark = pytest.mark.integration


@dataclass
class Bank:
    """A server that makes the transfer of each key once, and lists those with a reference."""

    faults: list[str] = field(default_factory=list)
    """What goes wrong with the next requests: "cut before", "cut after" or "unavailable"."""
    transfers: list[str] = field(default_factory=list)
    """References of the transfers, in their order."""
    keys: set[str] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of a connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        (method, target, _), *lines = (line.split(" ", 2) for line in head.split("\r\n") if line)
        fields = {name.lower(): value for name, value, *_ in lines}
        body = await reader.readexactly(int(fields.get("content-length:", "0")))
        fault = self.faults.pop(0) if self.faults else ""
        answer = b""
        if fault == "unavailable":
            answer = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
        elif method == "GET":
            [reference] = parse_qs(urlsplit(target).query)["reference"]
            found = json.dumps([one for one in self.transfers if one == reference]).encode()
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(found), found)
        elif fault != "cut before":
            if fields["idempotency-key:"] not in self.keys:
                self.transfers.append(json.loads(body)["reference"])
            self.keys.add(fields["idempotency-key:"])
            answer = b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n"
        if not fault.startswith("cut"):
            writer.write(answer)
        writer.close()


@asynccontextmanager
async def serving(bank: Bank) -> AsyncIterator[str]:
    """Run the server; yields its URL."""
    server = await asyncio.start_server(bank.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def test_a_payout_is_made_once_despite_disconnects_and_bank_outages(
    running_service: RunningService,
    send: Send,  # noqa: F811
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # payout:1 is lost on its way, payout:2 is made without an answer; each is asked about.
    bank = Bank(["cut before", "unavailable", "", "", "cut after"])
    await db.execute("INSERT INTO account (id, balance, version) VALUES ($1, 500, 0)", BOOKS)

    async def is_paid(amount: int) -> bool:
        # Nobody waits for the next attempt here.
        await db.execute("UPDATE pipeline.backlog SET due_at = now() WHERE due_at > now()")
        found = await db.fetchval("SELECT balance FROM account WHERE id = 'bank:de-1'")
        return bool(found == amount)

    async with serving(bank) as url:
        monkeypatch.setenv("BANK_URL", url)
        async with running_service():
            for number in (1, 2):
                payout = RequestPayout(
                    payout_id=f"payout:{number}",
                    merchant=BOOKS,
                    bank_account="bank:de-1",
                    amount=100,
                )
                await send(payout, payout.payout_id)
                await eventually(partial(is_paid, number * 100))
    assert bank.transfers == ["payout:1", "payout:2"]
    balances = dict(await db.fetch("SELECT id, balance FROM account WHERE balance <> 0"))
    assert balances == {BOOKS: 300, "bank:de-1": 200}
