"""`make prove`: handlers under faults come to the same as one by one, without a fault.

Nothing else imports this package. It needs what a service's tests need: PostgreSQL and Kafka of its
own, where it makes databases and sends messages to the topics of the service.
"""

from .proof import Proof

__all__ = ["Proof"]
