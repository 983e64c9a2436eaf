"""A delay reaches the webhook over HTTP, whatever that does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg
import pytest
from pydantic import SecretStr

from <<cookiecutter.package_name>> import handlers

from .conftest import RunningService
from .test_scans import Send, scan, send  # noqa: F401 (a fixture)
from tests.servers.waiting import eventually

pytestmark = pytest.mark.integration


@dataclass
class Webhook:
    """A server that does what it is told, and remembers what it has heard."""

    answers: list[str] = field(default_factory=list)
    """What it does with the next requests; nothing is wrong after that."""
    heard: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    """Idempotency keys and bodies, in their order."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what is asked on a connection, which stays open."""
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionResetError):  # the other side is gone
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; says whether more may come."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        self.heard.append((fields["idempotency-key"], body))
        answer = self.answers.pop(0) if self.answers else "204 No Content"
        if answer == "hang":
            await reader.read()  # until the other side gives up
        if answer in ("hang", "cut"):
            return False
        one_after_the_other = (
            f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n" for status in answer.split(", then ")
        )
        writer.write("".join(one_after_the_other).encode())
        return True


@asynccontextmanager
async def serving(webhook: Webhook) -> AsyncIterator[str]:
    """Run the server; yields its URL."""
    server = await asyncio.start_server(webhook.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/delays"
    finally:
        server.close()


async def test_delays_reach_a_webhook_despite_errors_hangs_disconnects_and_double_answers(
    running_service: RunningService,
    send: Send,  # noqa: F811
    db: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The second answer came with the first. Who keeps the connection takes it for the next call's.
    twice = "204 No Content, then 204 No Content"
    unavailable = "503 Service Unavailable"
    webhook = Webhook([unavailable, "hang", "cut", twice, unavailable])
    errors = set[str]()

    async def told() -> bool:
        rows = await db.fetch("SELECT error FROM pipeline.backlog WHERE error IS NOT NULL")
        errors.update(row["error"] for row in rows)
        # Nobody waits for the next attempt here.
        await db.execute("UPDATE pipeline.backlog SET due_at = now() WHERE due_at > now()")
        return not await db.fetchval("SELECT count(*) FROM pipeline.backlog")

    async with serving(webhook) as url:
        monkeypatch.setattr(handlers, "webhook", SecretStr(url))
        async with running_service():
            await send(scan(1, "Vienna", 61), scan(2, "Graz", 62))
            await eventually(lambda: len(webhook.heard) > 0)
            await eventually(told)
    keys = [key for key, _ in webhook.heard]
    assert [body["minutes_late"] for _, body in webhook.heard] == [61, 61, 61, 61, 62, 62]
    assert len(set(keys[:4])) == 1, "the same call, each time"
    assert len(set(keys[4:])) == 1, "what was answered 503 is called again"
    assert keys[4] != keys[0]
    assert any("answered 503" in error for error in errors)
    assert not any("delays" in error for error in errors), "a webhook's path may be its secret"
