"""Errors of PostgreSQL as texts for the page."""

import sqlalchemy.exc

from onceward.errors import (
    as_raised,
    describe_error,
    is_access_denied,
    is_contention,
    is_infrastructure,
    sqlstate_of,
)
from onceward.servers.revisions import NotMigrated
from onceward.settings import Settings

_NO_TABLES = ("3F000", "42P01")


def describe(error: Exception, settings: Settings) -> str | None:
    """Return what is wrong and what to do; None for an error in the page's code."""
    if isinstance(error, NotMigrated):
        return str(error)
    if sqlstate_of(error) in _NO_TABLES:
        return str(NotMigrated())
    if is_access_denied(error):
        advice = "Set PIPELINE_DATABASE_URL to that of the operator's role."
        return f"{describe_error(error)}. {advice}"
    is_late = isinstance(as_raised(error), TimeoutError | sqlalchemy.exc.TimeoutError)
    if is_late or is_contention(error):
        return f"{settings.postgresql} does not answer in time; try again."
    if is_infrastructure(error):
        return f"{settings.postgresql} can't be used: {describe_error(error)}; try again."
    return None
