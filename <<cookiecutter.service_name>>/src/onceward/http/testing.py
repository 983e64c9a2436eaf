"""The test kit of requests: `pytest_plugins = ["onceward.http.testing"]` in the top `conftest.py`.

Its fixture `harness` is that of `onceward.testing.plugin`, with `receive` beside.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from onceward import Event, Service
from onceward.apply.outcome import BatchOutcome
from onceward.servers.retrying import Retrying
from onceward.testing import Harness, Outcome
from onceward.testing.databases import ResettableDatabase
from onceward.testing.plugin import (
    harness_database,
    harness_migrate,
    harness_migrated,
    harness_server,
    harness_service,
    open_harness,
)
from onceward.testing.process import Step

from .receiver import Answer, Receiver
from .source import RequestSource

__all__ = [
    "Received",
    "RequestHarness",
    "harness",
    "harness_database",
    "harness_migrate",
    "harness_migrated",
    "harness_server",
    "harness_service",
]


@dataclass
class Received(Outcome):
    """The outcome of a request."""

    answer: Any = None
    """What the handler has returned, as JSON has it; of a repeat the stored result."""


class _Recording(Receiver):
    step: Step

    async def _receive(self, source: RequestSource, retrying: Retrying) -> BatchOutcome:
        outcome = await super()._receive(source, retrying)
        self.step.outcomes.append(outcome)
        return outcome


class RequestHarness(Harness):
    """A harness that applies requests as well, as `service api` does."""

    async def receive(
        self,
        event: Event,
        *,
        consumer: str,
        key: str = "test",
        scope: str = "",
        seconds: float = 60.0,
    ) -> Received:
        """Apply an event as a request with this key, by a consumer's handler.

        The same key with an equal event is a repeat: the outcome is a duplicate, and has the stored
        answer. Raises what `Receiver.receive` raises, and then nothing is stored: `KeyReused` for
        another event with the key and `Reject` (both 422), `Unavailable` (503), or another error of
        the handler (500).
        """
        answers: list[Answer] = []

        async def work() -> None:
            engine = self._mortal.engine if self._mortal else self.engine
            receiver = _Recording(self.service, engine, self._settings)
            receiver.step, receiver.claims = self._did, self._claims
            answers.append(
                await receiver.receive(
                    event, key=key, consumer=consumer, scope=scope, seconds=seconds
                )
            )

        outcome = await self._step(work)
        return Received(**vars(outcome), answer=answers[-1].answer)


@pytest.fixture
async def harness(
    harness_service: Service, harness_database: ResettableDatabase
) -> AsyncIterator[RequestHarness]:
    """The service, without Kafka, on a database that holds what the migrations have put there."""
    async with open_harness(harness_service, harness_database, RequestHarness) as one:
        yield one
