"""Models and migrations agree: what `tables.py` says is what `migrations/` make."""

import pytest
from alembic import command
from alembic.config import Config

from .conftest import ROOT

pytestmark = pytest.mark.integration


def test_models_and_migrations_agree(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINE_DATABASE_URL", database_url)
    # Raises, with every difference, if a new revision would not be empty.
    command.check(Config(ROOT / "alembic.ini"))
