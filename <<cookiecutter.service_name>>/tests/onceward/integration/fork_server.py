"""The fork server of the crash matrix: its batches share transactions on a slow machine, too."""

import math

from onceward.apply import transactions
from onceward.consume import gathering

from tests.servers.fork_server import serve

if __name__ == "__main__":
    gathering._EXPECTED_SECONDS, gathering._TIME_SHARE = math.inf, 1.0
    transactions._CAREFUL_SECONDS = 0.5  # also soon after a failure
    serve()
