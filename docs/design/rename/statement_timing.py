"""What the timing of a statement costs: `python statement_timing.py` in the service's folder, with src in PYTHONPATH.

Decides decision 43. The engine sends about a dozen statements for a batch, whatever its size, and a
handler that flushes alone about three. If `executed` takes more than 2 % of a message's CPU (see
docs/performance: about 100 us in a batch of one), the metric goes; else it stays.
"""

from timeit import repeat

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))

from pipeline.observe import statements  # noqa: E402  # after the provider

TEXTS = {
    "word first": "INSERT INTO pipeline.inbox (key) SELECT unnest($1::uuid[])",
    "space first": "\n    SELECT * FROM pipeline.backlog WHERE lane = $1 FOR UPDATE",
    "comment first": "-- a comment\nSELECT 1",
    "other": "CALL settle()" + " " * 2_000,
}
COUNT = 20_000
for name, text in TEXTS.items():
    whole = min(repeat(lambda: statements.executed(text, 0.001, None), number=COUNT, repeat=5))
    word = min(repeat(lambda: statements.first_word_of(text), number=COUNT, repeat=5))
    print(f"{name:14} {whole / COUNT * 1e6:6.2f} us a statement, {word / COUNT * 1e6:6.2f} us for the word")
