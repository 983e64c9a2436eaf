"""The engine's fixtures, on a database server of the module's own."""

from tests.onceward.integration.conftest import bank, commands  # noqa: F401 (fixtures)
from tests.onceward.integration.private_server import (  # noqa: F401 (fixtures)
    server_url,
    template,
    used_databases,
    way_in,
)
