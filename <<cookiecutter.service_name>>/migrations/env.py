"""What Alembic runs: the engine's revisions and yours, against the database of the settings."""

from importlib import import_module

from onceward import migrations

main = import_module("<<cookiecutter.package_name>>.main")
migrations.run(main.service.metadata, main.service.name)
