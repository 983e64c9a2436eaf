"""The generated payments example as it is, on topics of the benchmark.

`python -m benchmarks.ours_payments <command>` is the command `service`.
"""

import os
from dataclasses import replace

from onceward import Handlers, Service
from onceward.cli.commands import command_line

from benchmarks.payments_example import EVENTS, HANDLERS, TABLES

TOPIC = os.environ["BENCH_INPUT"]

handlers = Handlers()
handlers.topic(TOPIC, demands_types=True)
for one in HANDLERS:
    handlers.add(replace(one, topic=TOPIC))
for event in EVENTS:
    event.__event_topic__ = os.environ["BENCH_OUTPUT"]

main = command_line(Service(os.environ["BENCH_NAME"], handlers=handlers, metadata=TABLES))

if __name__ == "__main__":
    main()
