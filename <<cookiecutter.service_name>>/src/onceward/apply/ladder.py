"""The ladder: how messages are applied again after a transaction has failed.

    rung      what a transaction does                              what follows a failure
    --------  ---------------------------------------------------  -------------------------------
    batch     all messages are one run, without a savepoint        rolled back; the next rung
    runs      runs of messages, each within a savepoint            the run is divided, see below
    pieces    the same, for a few records in a transaction         likewise
    singles   the same, for one record in a transaction            likewise
    stored    no handler is called: the messages are stored, to    repeated until it succeeds
              be tried alone
    alone     one stored message is tried; every failure counts    its decision is stored

A *run* is consecutive messages with one session and one flush. If a call raises an error before it
has waited for anything, what it has changed is undone in memory: it is decided on as if it had been
isolated, later messages of its key follow it, and the run goes on. At its first other error a
run fails, and is rolled back to its savepoint, with such decisions. If a call has failed, the
messages before it are a run again, its message is *isolated*, as a run of one, and the rest is a
run; if the flush has failed, each half is a run. The failure of an isolated message is decided on;
`failures.py` says how.

A transaction with one message has isolated it: its failure is decided on, unless a time limit,
locks or a lost connection were in the way.

A transaction that fails as a whole, by a deadlock, its time limit, the COMMIT, a lost connection, a
statement of the engine or fifty failures without a success, is repeated one rung lower. So it ends:
a piece goes down at most five rungs, in each of which a failed run is divided into smaller ones,
and the lowest one calls no code that could fail. A single record for which the engine's own
statements fail is no message's fault: it is repeated until they succeed.
"""

import math
from typing import NamedTuple


class Rung(NamedTuple):
    """How a transaction applies messages."""

    records: float
    """Records of a transaction at most."""
    run: int | None
    """Messages of a run at most; None: all of them are one run, without a savepoint."""
    calls: bool = True
    """Whether handlers are called."""


IN_VAIN = 50
"""Failures of a consumer after which a transaction ends if none of its messages has succeeded: it
is for the breaker to judge a piece, with less to be rolled back."""
BATCH, RUNS, PIECES, SINGLES, STORED = range(5)
LADDER = (
    Rung(math.inf, None),
    Rung(1_000, 50),
    Rung(50, 50),
    Rung(1, 1),
    Rung(1, None, calls=False),
)
