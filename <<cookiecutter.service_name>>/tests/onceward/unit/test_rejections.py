"""Which errors of a batch are up to an event or its topic, and which are not."""

import pytest
from aiokafka import errors

from onceward.relay.rejections import rejection_of

EVENT = {"topic": "moves", "event_id": "e-1"}
OF_AN_EVENT = {"too large", "not valid"}
OUTAGES = [
    errors.RequestTimedOutError(),
    errors.KafkaConnectionError("reset"),
    errors.NodeNotReadyError("not ready"),
    errors.KafkaError("unexpected"),
    errors.ProducerClosed(),
    errors.InvalidTxnState(),
]
CODES = set(range(-1, 140)) - {errors.NoError.errno}


@pytest.mark.parametrize(
    "code", sorted(CODES - {getattr(error, "errno", None) for error in OUTAGES})
)
def test_broker_errors_for_a_batch_are_attributed_to_event_or_topic(code: int) -> None:
    error = errors.for_code(code)()
    rejection = rejection_of(error, EVENT)
    assert rejection is not None
    assert "moves" in rejection.text
    assert rejection.of_topic is (rejection.reason not in OF_AN_EVENT)
    if rejection.reason == "topic refuses":
        assert rejection.waits
        assert error.message in rejection.text


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_silence_and_the_end_of_a_transaction_reject_no_event(error: errors.KafkaError) -> None:
    assert rejection_of(error, EVENT) is None
