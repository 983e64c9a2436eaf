"""A broker may wait for the replicas of one topic for as long as the client waits for the broker.

What is wrong: a request of a producer has batches of several topics, and the broker answers it when
the replicas have all of them, or after the time-out in the request. That is the producer's
`request_timeout_ms`, after which the client gives the request up. So where one topic lacks
replicas, the other topics of the request get no answer either.

To see it: stop a follower that is in sync, and send to its topic and to one without replicas.

The change: the broker's time-out is a parameter, and may be shorter than the client's.
"""

from aiokafka import AIOKafkaProducer


def limit_wait_for_replicas(producer: AIOKafkaProducer, seconds: float) -> None:
    """Let brokers answer a request after `seconds`, whether replicas have its batches or not."""
    producer._sender._request_timeout_ms = round(1_000 * seconds)
