"""The figures: which plots are drawn of what was measured."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from statistics import median
from types import MappingProxyType

from benchmarks.bench import Book
from benchmarks.measures.growth import VARIED, name
from benchmarks.measures.ordinary import CONTESTANTS, FEW, MANY, RATES, named
from benchmarks.measures.xmin import SIDES, series_name
from benchmarks.plots import Bar, Points, bars, lines

ACROSS = {
    "payload": "bytes of a payload",
    "batch": "records of a transaction, at most",
    "partitions": "partitions",
    "shards": "shards of the outbox",
    "keys": "keys",
    "processes": "processes",
    "rows": "markers of closed generations",
}
WHO = ("python", "postgres", "kafka")


def draw(book: Book, sources: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the figures of the measures that were taken, by file name.

    `sources` says of measures what a reader has to know of their figures: it is added to titles.
    """
    taken = {run.measure for run in book.runs if run.round}
    figures: dict[str, str] = {}

    def titled(measure: str, title: str) -> str:
        return f"{title} ({sources[measure]})" if measure in sources else title

    if "throughput" in taken:
        title = titled("throughput", "Messages consumed, applied and published a second")
        figures["throughput.svg"] = bars(
            title, "messages/s", {"": _bars(book, "throughput", "rate")}
        )
        if any("cpu_postgres" in run.values for run in book.runs):
            title = titled("throughput", "CPU seconds for 1,000 messages")
            figures["cpu.svg"] = bars(title, "CPU seconds", _cpu(book))
    if "relay" in taken:
        title = titled("relay", "Events published a second from a backlog")
        figures["relay.svg"] = bars(title, "events/s", {"": _bars(book, "relay", "rate")})
    if "latency" in taken:
        title = titled("latency", "Milliseconds from record to event, 100 records/s")
        series = {of: _bars(book, "latency", of) for of in ("p50", "p99")}
        figures["latency.svg"] = bars(title, "ms", series)
    if "ordinary" in taken:
        title = titled("ordinary", "Latency on 1 and on 12 partitions, p50 (p99 dashed)")
        p50, p99 = (_by_rate(book, of) for of in ("p50", "p99"))
        figures["ordinary-latency.svg"] = lines(
            title, "messages/s", "ms", p50, dashed=p99, logarithmic=True
        )
        if costs := _by_rate(book, "cpu"):
            title = "CPU of Python and PostgreSQL for a message, on 1 and on 12 partitions"
            figures["ordinary.svg"] = lines(
                titled("ordinary", title), "messages/s", "ms", costs, logarithmic=True
            )
    for kind, across in ACROSS.items() if "growth" in taken else ():
        drawn = partial(lines, across=across, logarithmic=True)
        title = titled("growth", f"Rate by {across}")
        series_ = {"messages/s": _points(book, kind, "rate")}
        figures[f"growth-{kind}.svg"] = drawn(title, up="messages/s", series=series_)
        title = titled("growth", f"Latency by {across}")
        series_ = {of: _points(book, kind, of) for of in ("p50", "p99")}
        figures[f"growth-{kind}-latency.svg"] = drawn(title, up="ms", series=series_)
        title = titled("growth", f"Bytes on disk by {across}")
        series_ = {of: _points(book, kind, f"{of}_bytes") for of in ("marker", "event", "wal")}
        figures[f"growth-{kind}-size.svg"] = drawn(title, up="bytes", series=series_)
    if watched := book.series.get("memory over time"):
        title = titled("memory", "Memory of the service under a steady load")
        figures["memory.svg"] = lines(title, "seconds", "MB", {"resident": watched})
    if "xmin" in taken:
        title = titled("xmin", "Latency, p50, while a transaction is open, and without it")
        figures["xmin.svg"] = lines(title, "minutes", "ms", _by_minute(book, "p50"))
        title = titled("xmin", "Positions, cursor and lanes while a transaction is open")
        sizes = _by_minute(book, "hot_bytes", unit=1e-6)
        figures["xmin-size.svg"] = lines(title, "minutes", "MB", sizes)
    return figures


def _bars(book: Book, measure: str, of: str) -> list[Bar]:
    names = dict.fromkeys(run.contestant for run in book.runs if run.measure == measure)
    found = {
        one: [values[of] for values in book.rounds(measure, one) if of in values]
        for one in sorted(names)
    }
    return [Bar(one, median(all_), min(all_), max(all_)) for one, all_ in found.items() if all_]


def _cpu(book: Book) -> dict[str, list[Bar]]:
    # The usual way takes so much that the others could not be seen beside it.
    return {
        who: [one for one in _bars(book, "throughput", f"cpu_{who}") if "usual" not in one.label]
        for who in WHO
    }


def _by_rate(book: Book, of: str) -> dict[str, Points]:
    """Return a figure by the rate, of each contestant and number of partitions that has it."""
    series: dict[str, Points] = {}
    for who, partitions in product(CONTESTANTS, (FEW, MANY)):
        rounds = {rate: book.rounds("ordinary", named(who, rate, partitions)) for rate in RATES}
        found = {rate: [one[of] for one in all_ if of in one] for rate, all_ in rounds.items()}
        if points := [(float(rate), median(values)) for rate, values in found.items() if values]:
            series[f"{who.name}, {partitions}"] = points
    return series


def _by_minute(book: Book, of: str, *, unit: float = 1.0) -> dict[str, Points]:
    """Return a figure over time, of each side that was run."""
    found = {who: book.series.get(series_name(who, of), []) for who in SIDES}
    return {who: [(x, y * unit) for x, y in points] for who, points in found.items() if points}


def _points(book: Book, kind: str, of: str) -> Points:
    found = {
        float(getattr(point, kind)): [
            values[of] for values in book.rounds("growth", name(kind, point)) if of in values
        ]
        for point in VARIED[kind]
    }
    return [(x, median(values)) for x, values in found.items() if values]
