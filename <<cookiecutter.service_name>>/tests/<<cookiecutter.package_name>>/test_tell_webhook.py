"""The webhook is called of a delay. A pattern for the tests of your own calls to the outside."""

import pytest
from pydantic import SecretStr

from onceward.effects import Call
from onceward.testing import Harness

from <<cookiecutter.package_name>> import handlers
from <<cookiecutter.package_name>>.events import ParcelDelayed

from .test_record_scan import scan


@pytest.fixture(autouse=True)
def webhook(no_webhook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "webhook", SecretStr("https://example.org/delays"))


async def test_a_delay_is_sent_again_after_the_webhooks_answer_is_lost(harness: Harness) -> None:
    outcome = await harness.handle(scan(1, "Vienna", 61))
    delayed = ParcelDelayed(parcel_id="p-1", minutes_late=61, scanner="scanner-1", number=1)
    assert outcome.calls == [delayed]
    keys = []

    async def webhook(event: ParcelDelayed, call: Call) -> int:
        keys.append(call.id)
        if call.attempt == 1:
            raise ConnectionError("cut off")
        return 204

    (failure,) = (await harness.run_calls({"tell-webhook": webhook})).failures
    assert (failure.error, failure.decision) == ("ConnectionError: cut off", "parked")
    await harness.advance(minutes=1)
    called = await harness.run_calls({"tell-webhook": webhook})
    assert called.results == [204]
    first, second = keys
    assert first == second, "the same idempotency key"
