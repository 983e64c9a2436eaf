"""What a person should do about a dead letter or a dead event."""

from collections.abc import Mapping
from typing import Any

from onceward.errors import MISSING

DISCARDED = "nothing: it was discarded, and its row is deleted when it is too old"
LACKING = (
    "run `service doctor`, which names what the database lacks; write its migration if there is"
    " none, run `service migrate`, then redrive it if it is dead"
)
"""If its error is that of a missing table or column."""
_LACKING_ERRORS = tuple(f"{error.__qualname__}:" for error in MISSING)


def advice_on(entry: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """Return the advice for an entry's state, error and reason."""
    if entry["state"] == "discarded":
        return DISCARDED
    if (entry["error"] or "").startswith(_LACKING_ERRORS):
        return LACKING
    return reasons.get(entry["reason"], "nothing is known of this reason")
