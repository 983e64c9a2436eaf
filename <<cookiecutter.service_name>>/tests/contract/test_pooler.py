"""The same promises through PgBouncer in transaction mode."""

from sqlalchemy import make_url

from .ledger import Ledger
from tests.servers.databases import url_of
from tests.servers.pooler import pooling
from tests.servers.processes import Start


async def test_the_service_keeps_its_promises_behind_a_pooler_in_transaction_mode(
    ledger: Ledger, start: Start, server_url: str, direct_url: str
) -> None:
    with pooling(server_url) as pooler:
        url = url_of(pooler.url, make_url(direct_url).database or "")
        async with ledger.traffic():
            killed = await start("run", database_url=url, database_pooler=True)
            await ledger.progresses()
            await killed.kill()
            await start("run", database_url=url, database_pooler=True)
            await ledger.progresses()
