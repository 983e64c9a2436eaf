"""The figures: which plots are drawn of what was measured."""

from collections.abc import Sequence
from itertools import product
from statistics import median

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


def draw(book: Book) -> dict[str, str]:
    """Return the figures of the measures that were taken, by file name."""
    taken = {run.measure for run in book.runs if run.round}
    figures: dict[str, str] = {}
    if "throughput" in taken:
        figures["throughput.svg"] = _throughput(book)
        if any("cpu_postgres" in run.values for run in book.runs):
            figures["cpu.svg"] = _cpu(book)
    if "relay" in taken:
        title = "Events published a second from a backlog"
        figures["relay.svg"] = bars(title, "events/s", {"": _bars(book, "relay", "rate")})
    if "latency" in taken:
        title = "Milliseconds from record to event, 100 records/s"
        series = {of: _bars(book, "latency", of) for of in ("p50", "p99")}
        figures["latency.svg"] = bars(title, "ms", series)
    if "ordinary" in taken:
        figures["ordinary-latency.svg"] = _ordinary_latency(book)
        if costs := _by_rate(book, "cpu"):
            title = "CPU of Python and PostgreSQL for a message, on 1 and on 12 partitions"
            figures["ordinary.svg"] = lines(title, "messages/s", "ms", costs, logarithmic=True)
    for kind in VARIED:
        if _points(book, kind, "rate"):
            figures[f"growth-{kind}.svg"] = _rate_by(book, kind)
            figures[f"growth-{kind}-latency.svg"] = _latency_by(book, kind)
            figures[f"growth-{kind}-size.svg"] = _size_by(book, kind)
    if series_ := book.series.get("memory over time"):
        title = "Memory of the service under a steady load"
        figures["memory.svg"] = lines(title, "seconds", "MB", {"resident": series_})
    if "xmin" in taken:
        title = "Latency, p50, while a transaction is open, and without it"
        figures["xmin.svg"] = lines(title, "minutes", "ms", _by_minute(book, "p50"))
        title = "Positions, cursor and lanes while a transaction is open, and without it"
        sizes = _by_minute(book, "hot_bytes", unit=1e-6)
        figures["xmin-size.svg"] = lines(title, "minutes", "MB", sizes)
    return figures


def _bars(book: Book, measure: str, of: str) -> list[Bar]:
    names = dict.fromkeys(run.contestant for run in book.runs if run.measure == measure)
    found = {one: [values[of] for values in book.rounds(measure, one)] for one in sorted(names)}
    return [Bar(one, median(all_), min(all_), max(all_)) for one, all_ in found.items() if all_]


def _throughput(book: Book) -> str:
    return bars(
        "Messages consumed, applied and published a second",
        "messages/s",
        {"": _bars(book, "throughput", "rate")},
    )


def _cpu(book: Book) -> str:
    # The usual way takes so much that the others could not be seen beside it.
    series = {
        who: [one for one in _bars(book, "throughput", f"cpu_{who}") if "usual" not in one.label]
        for who in WHO
    }
    return bars("CPU seconds for 1,000 messages", "CPU seconds", series)


def _by_rate(book: Book, of: str) -> dict[str, Points]:
    """Return a figure by the rate, of each contestant and number of partitions that has it."""
    series: dict[str, Points] = {}
    for who, partitions in product(CONTESTANTS, (FEW, MANY)):
        rounds = {rate: book.rounds("ordinary", named(who, rate, partitions)) for rate in RATES}
        found = {rate: [one[of] for one in all_ if of in one] for rate, all_ in rounds.items()}
        if points := [(float(rate), median(values)) for rate, values in found.items() if values]:
            series[f"{who.name}, {partitions}"] = points
    return series


def _ordinary_latency(book: Book) -> str:
    title = "Latency on 1 and on 12 partitions, p50 (p99 dashed)"
    p50, p99 = (_by_rate(book, of) for of in ("p50", "p99"))
    return lines(title, "messages/s", "ms", p50, dashed=p99, logarithmic=True)


def _by_minute(book: Book, of: str, *, unit: float = 1.0) -> dict[str, Points]:
    """Return a figure over time, of each side that was run."""
    found = {who: book.series.get(series_name(who, of), []) for who in SIDES}
    return {who: [(x, y * unit) for x, y in points] for who, points in found.items() if points}


def _points(book: Book, kind: str, of: str) -> Points:
    found = {
        float(getattr(point, kind)): [
            values[of] for values in book.rounds("growth", name(kind, point))
        ]
        for point in VARIED[kind]
    }
    return [(x, median(values)) for x, values in found.items() if values]


def _rate_by(book: Book, kind: str) -> str:
    title = f"Rate by {ACROSS[kind]}"
    series = {"messages/s": _points(book, kind, "rate")}
    return lines(title, ACROSS[kind], "messages/s", series, logarithmic=True)


def _latency_by(book: Book, kind: str) -> str:
    quantiles: Sequence[str] = ("p50", "p99")
    series = {of: _points(book, kind, of) for of in quantiles}
    return lines(f"Latency by {ACROSS[kind]}", ACROSS[kind], "ms", series, logarithmic=True)


def _size_by(book: Book, kind: str) -> str:
    series = {of: _points(book, kind, f"{of}_bytes") for of in ("marker", "event", "wal")}
    title = f"Bytes on disk by {ACROSS[kind]}"
    return lines(title, ACROSS[kind], "bytes", series, logarithmic=True)
