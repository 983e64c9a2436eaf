"""Which errors of a batch are up to an event or its topic, and which are not."""

import pytest
from aiokafka import errors

from pipeline.relay.rejected import rejection_of

EVENT = {"topic": "moves", "event_id": "e-1"}
OF_AN_EVENT = {"too large", "not valid"}
OF_PRODUCERS = [
    errors.ClusterAuthorizationFailedError(),
    errors.InvalidProducerIdMapping(),
    errors.InvalidTxnState(),
    errors.TransactionalIdAuthorizationFailed(),
    errors.ProducerFenced(),
    errors.ProducerClosed(),
]
OUTAGES = [
    errors.RequestTimedOutError(),
    errors.KafkaConnectionError("reset"),
    errors.NodeNotReadyError("not ready"),
    errors.KafkaError("unexpected"),
]
CODES = set(range(-1, 140)) - {errors.NoError.errno}


@pytest.mark.parametrize(
    "code",
    sorted(CODES - {getattr(error, "errno", None) for error in [*OF_PRODUCERS, *OUTAGES]}),
)
def test_whatever_brokers_answer_to_a_batch_is_up_to_an_event_or_its_topic(code: int) -> None:
    error = errors.for_code(code)()
    rejection = rejection_of(error, EVENT)
    assert rejection is not None
    assert "moves" in rejection.text
    assert rejection.of_topic is (rejection.reason not in OF_AN_EVENT)
    if rejection.reason == "topic refuses":
        assert rejection.waits
        assert error.message in rejection.text


@pytest.mark.parametrize("error", [*OF_PRODUCERS, *OUTAGES], ids=lambda error: type(error).__name__)
def test_what_is_up_to_the_producer_or_the_brokers_rejects_no_event(
    error: errors.KafkaError,
) -> None:
    assert rejection_of(error, EVENT) is None
