"""`make prove`: handlers under faults come to the same as one by one, without a fault.

Nothing else imports this package. It needs PostgreSQL and Kafka,
where it creates databases and sends messages to the topics of the service.
"""

from .proof import Proof

__all__ = ["Proof"]
