"""The number of messages in a transaction, adapted to the duration of handlers."""

import math
from collections.abc import Sequence

from pipeline.settings import Settings

from .outcome import BatchOutcome

_SHARE = 0.25
"""Share of the transaction's time limit that its handlers may take."""
_FIRST = 100
"""Messages of the first transaction, before the handlers' duration is known."""
_AT_LEAST = 2
"""With one message at a time, it could not be measured that several take no longer."""


class Pace:
    """Adapts the number of messages to the time that handlers take.

    A transaction that exceeds its time limit is rolled back and applied again in halves, so the
    calls of slow handlers would be wasted.
    """

    def __init__(self, settings: Settings) -> None:
        self._at_most = settings.batch_size
        self._seconds = _SHARE * settings.transaction_timeout
        self.limit = min(_FIRST, settings.batch_size)
        """Messages of the next transaction."""

    def learn(self, outcomes: Sequence[BatchOutcome]) -> None:
        """Adapt to messages that were applied in one transaction, or had to be divided."""
        self.limit = min(self._at_most, 2 * self.limit)
        for one in outcomes:
            if one.applied:
                fitting = math.ceil(len(one.applied) * self._seconds / one.seconds)
                self.limit = min(self.limit, max(_AT_LEAST, fitting))
        if len(outcomes) > 1:  # the messages did not fit into one transaction
            largest = max(len(one.applied) for one in outcomes)
            self.limit = min(self.limit, max(_AT_LEAST, largest))
