"""Tables and plots of the pages of measures, written from what is shown of the kept report."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import figures
from benchmarks.bench import Book, Run
from benchmarks.marks import GOALS, SATURATED, Values, is_saturated, ratios
from benchmarks.measures import MEASURES
from benchmarks.measures.growth import VARIED, name
from benchmarks.measures.ledger import SIDES as LEDGER
from benchmarks.measures.ordinary import MANY, RATES, named
from benchmarks.measures.peers import PEERS
from benchmarks.measures.poison import KEYS, KINDS, SHARES
from benchmarks.measures.poison import named as named_failing
from benchmarks.measures.streamed import PER_SECOND as STREAMED
from benchmarks.measures.xmin import CLOSED, LENGTH, MOMENTS, SIDES
from benchmarks.payments import BARE_ORM as BARE
from benchmarks.rig import BARE_ORM, OURS
from benchmarks.runs import PER_SECOND

EARLIER = " †"
"""Marks figures of an earlier engine."""
LEFT_OUT = "not measured on this engine"
PLOTS = {
    "### Rates": {
        "throughput": "Messages a second by contestant and keys",
        "cpu": "CPU a message",
        "relay": "Events a second of the relay",
    },
    "### Latency": {"latency": "Latency"},
    "### At ordinary rates": {
        "ordinary": "CPU a message by rate",
        "ordinary-latency": "Latency by rate",
    },
    "### During an open transaction": {
        "xmin": "Latency, p50, while a transaction is open, and without it",
        "xmin-size": "Positions, cursor and lanes while a transaction is open",
    },
    "### Growth": {
        "growth-batch": "Rate by batch",
        "growth-keys": "Rate by keys",
        "growth-payload": "Rate by payload",
        "growth-processes": "Rate by processes",
        "memory": "Memory over ten minutes",
    },
}
"""The plots with which sections end, and what is shown of each."""

Report = Mapping[str, Any]


def book_of(report: Report) -> Book:
    """Return what a report holds, as measures note it."""
    return Book([Run(**run) for run in report["runs"]], series=report["series"])


def told(pages: Mapping[Path, str], report: Report) -> dict[Path, str]:
    """Return the pages with tables and plots of what is shown of a report.

    Raises `ValueError` unless each table and each section with plots is on one page.
    """
    book = book_of(report)

    def of(measure: str, rows: Iterable[Sequence[str]]) -> Iterable[Sequence[str]]:
        """Mark the rows of a measure of an earlier engine."""
        sign = EARLIER if measure in report["earlier"] else ""
        return [(f"{first}{sign}", *cells) for first, *cells in rows]

    cores = [*of("throughput", _cores(book)), *of("peers", _peers(book))]
    tables: dict[str, Iterable[Sequence[str]]] = {
        "| mark ": _marks(report),
        "| commit ": _sources(report),
        "| what ": [
            row
            for name in ("latency", "relay", "dropping")
            for row in of(name, _results(book, name))
        ],
        "| contestant, 1,000 keys ": cores,
        "| latency ": [
            row for name in ("latency", "streamed") for row in of(name, _latencies(book, name))
        ],
        "| records/s ": of("ordinary", _ordinary(book)),
        "| layer ": of("layers", _layers(book)),
        "| varied ": of("growth", _growth(book)),
        "| failing ": of("poison", _poison(book)),
        "| payments ": of("ledger", _ledger(book)),
        "| minute ": of("xmin", _xmin(book, report["options"]["minutes"])),
    }
    texts = dict(pages)
    for header, rows in tables.items():
        head = re.compile(rf"^{re.escape(header)}.*\n\| -", re.MULTILINE)
        [page] = [one for one, text in texts.items() if head.search(text)]
        texts[page] = with_table(texts[page], header, rows)
    drawn = figures.draw(book)
    for heading in PLOTS:
        [page] = [one for one, text in texts.items() if f"\n{heading}\n" in text]
        texts[page] = with_plots(texts[page], heading, drawn)
    return texts


def _marks(report: Report) -> Iterable[Sequence[str]]:
    marks = {mark["name"]: mark for mark in report["marks"]}
    for goal in GOALS:
        mark = marks.get(goal.name)
        # A mark of another goal says nothing of this one.
        if mark is None or mark["goal"] != goal.text:
            continue
        name = goal.name + (EARLIER if goal.measure in report["earlier"] else "")
        if mark["value"] is None:
            yield name, goal.text, "", "", "", mark["remark"]
            continue
        spread = _spread([mark["least"], mark["most"]], ".3g")
        reference = "" if mark["reference"] is None else _number(mark["reference"])
        met = "yes" if mark["met"] else "no"
        yield name, goal.text, f"{mark['value']:.3g}", spread, reference, met


def _sources(report: Report) -> Iterable[Sequence[str]]:
    """Say of which commit, engine and Python the measures are, those of one together."""
    of: dict[tuple[str, ...], list[str]] = {}
    for measure, one in report["measured"].items():
        which = f"an earlier one{EARLIER}" if measure in report["earlier"] else "this one"
        source: tuple[str, ...] = (
            one["commit"][:7],
            one["on"],
            which,
            one.get("python") or "unknown",
        )
        of.setdefault(source, []).append(f"`{measure}`")
    for source, names in of.items():
        yield *source, ", ".join(names)
    if others := [f"`{name}`" for name in MEASURES if name not in report["measured"]]:
        yield LEFT_OUT, "", "", "", ", ".join(others)


def _results(book: Book, measure: str) -> Iterable[Sequence[str]]:
    def of(contestant: str, *names: str) -> str:
        found = book.rounds(measure, contestant)
        return ", ".join(_median(found, name) for name in names) if found else ""

    row: Sequence[str]
    match measure:
        case "latency":
            single = of("ours, relay apart", "single_p50", "single_most")
            row = "a single event after a pause, p50 and most, ms", single, "with a relay apart"
        case "relay":
            alone, headers = of("producer", "rate"), of("producer, headers", "rate")
            remark = f"producer: {alone}; with headers: {headers}"
            row = "events/s of the relay alone", of("relay", "rate"), remark
        case _:
            pauses, without = (
                of(who, "during_pause_ms", "before_pause_ms") for who in ("ours", "nothing")
            )
            what = "longest pause of consuming while retention drops, and before, ms"
            row = what, pauses, f"while it drops nothing: {without}"
    if row[1]:
        yield row


def _cores(book: Book) -> Iterable[Sequence[str]]:
    """Say how much of a core each process was at work, and for how long for a message."""
    for who in ("bare", "bare-orm", "ours", "ours-sql", "usual"):
        if found := book.rounds("throughput", f"{who}, 1,000 keys"):
            yield who, *_core(found)


def _peers(book: Book) -> Iterable[Sequence[str]]:
    for who in ("ours", *PEERS):
        if found := book.rounds("peers", who):
            yield ("ours, with the peers' Python" if who == "ours" else who), *_core(found)


def _core(found: Sequence[Values]) -> Iterable[str]:
    """Yield rate, share of a core, and the µs of both processes for a message."""
    yield _number(median(one["rate"] for one in found))
    yield f"{median(one['rate'] * one['cpu_python'] / 1_000 for one in found):.2f}"
    yield from _costs(found)


def _latencies(book: Book, measure: str) -> Iterable[Sequence[str]]:
    """Say how long events take, and what each process took meanwhile."""
    names = dict.fromkeys(run.contestant for run in book.runs if run.measure == measure)
    per_second = PER_SECOND if measure == "latency" else STREAMED
    for who in names:
        if found := book.rounds(measure, who):
            times = [_median(found, of) for of in ("commit_p50", "commit_p99", "p50", "p99")]
            if measure == "latency":
                times[:2] = "", ""
            yield f"{per_second:,}/s, {who}", *times, *_busy(found)


def _busy(found: Sequence[Values]) -> Iterable[str]:
    """Yield the cores that each process took, and the idle share of the machine."""
    for process in ("python", "postgres", "kafka", "probe"):
        busy = [one[f"busy_{process}"] for one in found if f"busy_{process}" in one]
        yield f"{median(busy):.2f}" if busy else ""
    idle = [one["machine_idle"] for one in found if "machine_idle" in one]
    yield f"{median(idle):.0%}" if idle else ""


def _ordinary(book: Book) -> Iterable[Sequence[str]]:
    """Say at each rate on a dozen partitions what a message costs whom, and how long it takes."""
    for rate, who in product(RATES, (OURS, BARE_ORM)):
        found = book.rounds("ordinary", named(who, rate, MANY))
        if found:
            cells = [_median(found, one) for one in ("commits", "p50", "p99")]
            yield f"{rate:,}", who.name, *_costs(found), *cells, *_busy(found)


def _layers(book: Book) -> Iterable[Sequence[str]]:
    """Say how many µs of Python each layer takes for a message."""
    of = {who: book.rounds("layers", who) for who in ("ours", "ours-sql", "bare")}
    for layer in of["ours"][0] if of["ours"] else ():
        yield (
            layer,
            *(
                _median(found, layer) if found and layer in found[0] else ""
                for found in of.values()
            ),
        )


def _growth(book: Book) -> Iterable[Sequence[str]]:
    for kind, points in VARIED.items():
        for point in points:
            if found := book.rounds("growth", name(kind, point)):
                of = ("rate", "p50", "p99", "marker_bytes", "event_bytes", "wal_bytes")
                yield f"{kind} {getattr(point, kind):,}", *(_median(found, one) for one in of)


def _poison(book: Book) -> Iterable[Sequence[str]]:
    """Say what a message costs where some fail, and the rate by CPU as a share of that of none."""
    if not any(run.measure == "poison" for run in book.runs):
        return
    for kind, share in (("", 0.0), *product(KINDS, SHARES)):
        runs = {keys: book.rounds("poison", named_failing(keys, kind, share)) for keys in KEYS}
        cells = [f"{share * 100:g} % {KINDS[kind]}" if kind else "none"]
        cells.append(_number(runs[KEYS[0]][0]["scans"]))
        for keys, found in runs.items():
            shares = ratios(found, book.rounds("poison", named_failing(keys)), "per_cpu")
            cells += [f"{median(shares):.2g}", *_costs(found)]
        yield cells


def _ledger(book: Book) -> Iterable[Sequence[str]]:
    """Say what a message of the payments costs, and the rate by CPU as a share of bare-orm's."""
    for side in LEDGER:
        if found := book.rounds("ledger", side.name):
            bare = book.rounds("ledger", replace(side, contestant=BARE, processes=1).name)
            shares = ratios(found, bare, "per_cpu") if side.contestant is not BARE else []
            share = f"{median(shares):.2g}" if shares else ""
            rates = [_median(found, of) for of in ("rate", "per_cpu")]
            yield side.name, *rates, share, *_costs(found)


_XMIN = {
    **dict.fromkeys(("rate", "p50", "p99"), 1),
    **dict.fromkeys(("cpu_python", "cpu_postgres"), 1000),
    **{f"{table}_bytes": 1e-3 for table in ("position", "outbox_cursor", "backlog_lane", "parcel")},
    **{f"{table}_bytes": 1e-6 for table in ("inbox", "outbox")},
}
"""What the table says of each moment, and in which unit: 1/s, ms, µs, kB and MB."""


def _xmin(book: Book, minutes: float) -> Iterable[Sequence[str]]:
    """Say how figures change beside an open transaction, and without one."""
    if not any(run.measure == "xmin" for run in book.runs):
        return
    sides = {who: book.rounds("xmin", who)[0] for who in SIDES}
    for moment, (who, found) in product(MOMENTS, sides.items()):
        state = "ended" if SIDES[who] and moment > CLOSED else who
        cells = (_at(found, f"{of} at {moment}", unit) for of, unit in _XMIN.items())
        yield f"{moment * minutes * LENGTH / MOMENTS[-1]:g}", state, *cells
    for who, found in sides.items():
        slopes = (_at(found, f"{of} a minute", unit, digits=2) for of, unit in _XMIN.items())
        yield "each", who, *slopes


def _at(found: Values, of: str, unit: float, digits: int | None = None) -> str:
    if of not in found:
        return SATURATED
    value = found[of] * unit
    # 0 is added because it would be written as -0 otherwise.
    return _number(value if digits is None else round(value, digits) + 0.0)


def _costs(found: Sequence[Values]) -> Iterable[str]:
    """Yield the µs of both processes for a message."""
    for cpu in ("cpu_python", "cpu_postgres"):
        yield _median(found, cpu, 1_000)


def _median(found: Sequence[Values], of: str, times: float = 1) -> str:
    """Return the median of a figure in the rounds that have it, and why none has if so."""
    values = [one[of] * times for one in found if of in one]
    if values:
        return _number(median(values))
    return SATURATED if any(map(is_saturated, found)) else ""


def with_table(page: str, header: str, rows: Iterable[Sequence[str]]) -> str:
    """Return the page with other rows in the table that begins so."""
    lines = page.splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if line.startswith(header))
    rest = range(first, len(lines))
    last = next((n for n in rest if not lines[n].startswith("|")), len(lines))
    head = [cell.strip() for cell in lines[first].strip().strip("|").split("|")]
    nothing = [[f"{LEFT_OUT}", *[""] * (len(head) - 1)]]
    table = [head, ["-" * len(cell) for cell in head], *(list(rows) or nothing)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table[1] = ["-" * width for width in widths]
    lines[first:last] = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |\n"
        for cells in table
    ]
    return "".join(lines)


def with_plots(page: str, heading: str, drawn: Collection[str]) -> str:
    """Return the page with those plots at the end of a section that are drawn."""
    plots = [
        f"![{shown}](performance/{name}.svg)"
        for name, shown in PLOTS[heading].items()
        if f"{name}.svg" in drawn
    ]

    def changed(section: re.Match[str]) -> str:
        text = re.sub(r"^!\[.*\n?", "", section[0], flags=re.MULTILINE)
        text = re.sub(r"\n{3,}", "\n\n", text).rstrip("\n")
        parts = [text, "\n".join(plots)] if plots else [text]
        return "\n\n".join(parts) + ("\n\n" if section["more"] else "\n")

    pattern = rf"^{heading}\n.*?(?=(?P<more>^##)|\Z)"
    page, found = re.subn(pattern, changed, page, flags=re.DOTALL | re.MULTILINE)
    if found != 1:
        raise ValueError(f"the page has no section {heading!r}, or several")
    return page


def _spread(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} – {max(values):{form}}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
