"""Real processes of the bank, for the tests that start, stop and kill them."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from .bank import Bank
from tests.servers import processes
from tests.servers.processes import Start
from tests.servers.proxy import proxy

APP = f"{__package__}.app"


def variables_of(bank: Bank) -> dict[str, str]:
    """Return the variables that name a bank to its processes."""
    return {
        "BANK_DEPOSITS": bank.deposits,
        "BANK_BALANCES": bank.balances,
        "BANK_NAME": bank.name,
    }


def environment(bank: Bank, **settings: object) -> dict[str, str]:
    """Return the environment of a process of the bank; no other settings reach it."""
    return processes.environment(variables_of(bank), **settings)


def starting(bank: Bank, **common: object) -> AbstractAsyncContextManager[Start]:
    """Start processes of the bank; what still runs at the end of the block is killed."""
    return processes.starting(APP, lambda: variables_of(bank), **common)


@asynccontextmanager
async def forwarding(port: int, to: str) -> AsyncIterator[None]:
    """Listen on a port and pass everything on to the address, as if the server had come up."""
    host, _, to_port = to.rpartition(":")
    async with proxy(host, int(to_port), listen=port):
        yield
