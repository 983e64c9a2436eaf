"""The routes of the bank's HTTP API."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from onceward import Service
from onceward.http.app import Idempotent, create_app
from onceward.settings import Settings

from .cashier import CASHIER
from tests.contract.bank import Deposited


class Balance(BaseModel):
    """The answer to a deposit."""

    account: str
    balance: int


def app_of(service: Service, settings: Settings | None = None) -> FastAPI:
    """Return the application of a bank with a cashier."""
    app = create_app(service, settings)

    @app.post("/deposits", status_code=201)
    async def pay_in(deposit: Deposited, request: Idempotent) -> Balance:
        return Balance.model_validate(await request.receive(deposit, consumer=CASHIER))

    @app.post("/{caller}/deposits", status_code=201)
    async def pay_in_for(caller: str, deposit: Deposited, request: Idempotent) -> Any:
        return await request.receive(deposit, consumer=CASHIER, scope=caller)

    return app
