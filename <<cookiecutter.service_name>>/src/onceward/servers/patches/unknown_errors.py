"""The errors INVALID_RECORD, GROUP_MAX_SIZE_REACHED and FENCED_INSTANCE_ID are unknown.

What is wrong: `for_code` returns `UnknownError` for them, which says neither what is wrong nor that
it is in vain to try again. A broker that returns INVALID_RECORD looks unavailable.

To see it: send a record without a key to a topic that is compacted.

The change: the errors have classes, with their numbers and names of Kafka's protocol.
"""

from aiokafka.errors import BrokerResponseError, kafka_errors


class GroupIsFullError(BrokerResponseError):  # type: ignore[misc]  # it has no types
    """The broker's error GROUP_MAX_SIZE_REACHED."""

    errno = 81
    message = "GROUP_MAX_SIZE_REACHED"
    description = "The group has as many members as the broker allows (group.max.size)."


class FencedInstanceIdError(BrokerResponseError):  # type: ignore[misc]  # it has no types
    """The broker's error FENCED_INSTANCE_ID."""

    errno = 82
    message = "FENCED_INSTANCE_ID"
    description = "A process that joined later has the same PIPELINE_KAFKA_GROUP_INSTANCE_ID."

    def __repr__(self) -> str:  # all that aiokafka raises of it
        return f"{type(self).__name__}: {self.description}"


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]  # it has no types
    """The broker's error INVALID_RECORD."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker does not take this record."


for _error in (GroupIsFullError, FencedInstanceIdError, InvalidRecordError):
    kafka_errors.setdefault(_error.errno, _error)
