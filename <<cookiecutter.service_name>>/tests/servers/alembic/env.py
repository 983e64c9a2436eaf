"""Alembic's environment for the engine's tables alone."""

from sqlalchemy import MetaData

from onceward import migrations

migrations.run(MetaData())
