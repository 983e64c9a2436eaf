"""What is kept of the measures: report and plots in docs/performance, and the tables about them.

A measure compares only what has run beside each other, so each may be taken anew by itself; the
report says of which commit each is.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import figures
from benchmarks.bench import Book, Run
from benchmarks.marks import GOALS, Values, ratios
from benchmarks.measures import MEASURES
from benchmarks.measures.ordinary import MANY, RATES
from benchmarks.measures.ordinary import named as named_at
from benchmarks.measures.peers import PEERS
from benchmarks.measures.poison import KEYS, KINDS, SHARES
from benchmarks.measures.poison import named as named_failing
from benchmarks.measures.xmin import CLOSED, LENGTH, MOMENTS, SIDES
from benchmarks.rig import BARE_ORM, OURS
from demo.flights import ROOT

PLOTS = ROOT / "docs" / "performance"
REPORT = PLOTS / "report.json"
PAGE = ROOT / "docs" / "performance.md"

Report = Mapping[str, Any]


def hindrance(measures: Collection[str], options: Mapping[str, Any]) -> str | None:
    """Say why measures taken with these options cannot be kept beside the others; or None."""
    staying = [name for name in MEASURES if name not in measures]
    if not staying:
        return None
    before = _kept()
    if not before:
        return f"nothing is kept yet of {', '.join(staying)}: take all measures"
    others = before["options"]
    if unlike := [f"{name} {value}" for name, value in others.items() if options[name] != value]:
        return f"what is kept was taken with {', '.join(unlike)}: take the same, or all measures"
    return None


def keep(report: Report) -> None:
    """Put the measures of a report in place of those kept; draw the plots, write the tables anew.

    To be asked before whether there is a `hindrance`.
    """
    whole = joined(report, _kept())
    PLOTS.mkdir(parents=True, exist_ok=True)
    write(whole, PLOTS)
    PAGE.write_text(told(PAGE.read_text("utf-8"), whole), "utf-8")


def _kept() -> Report:
    """Return the report that is kept; nothing if there is none yet."""
    found: Report = json.loads(REPORT.read_text("utf-8")) if REPORT.exists() else {}
    return found


def write(report: Report, folder: Path) -> None:
    """Write a report, and the figures of what it holds."""
    text = json.dumps(report, indent=2, ensure_ascii=False)
    (folder / "report.json").write_text(text + "\n", "utf-8")
    for name, svg in figures.draw(_book_of(report)).items():
        (folder / name).write_text(svg, "utf-8")


def joined(report: Report, kept: Report) -> Report:
    """Return a report with what another one has of other measures."""
    staying = set(kept.get("measured", {})) - set(report["measured"])
    if not staying:
        return report
    of_goal = {goal.name: goal.measure for goal in GOALS}
    marks = {mark["name"]: mark for mark in kept["marks"] if of_goal.get(mark["name"]) in staying}
    marks |= {mark["name"]: mark for mark in report["marks"]}
    return {
        **report,
        "measured": {
            name: (report if name in report["measured"] else kept)["measured"][name]
            for name in MEASURES
            if name in staying or name in report["measured"]
        },
        "marks": [marks[goal.name] for goal in GOALS if goal.name in marks],
        "runs": [run for run in kept["runs"] if run["measure"] in staying] + report["runs"],
        "series": kept["series"] | report["series"],
    }


def told(page: str, report: Report) -> str:
    """Return the page with the tables of a report."""
    book = _book_of(report)
    page = _with_table(page, "| mark ", _marks(report))
    page = _with_table(page, "| commit ", _sources(report))
    page = _with_table(page, "| what ", _results(book))
    page = _with_table(page, "| contestant, 1,000 keys ", _cores(book))
    if "ordinary" in report["measured"]:
        page = _with_table(page, "| records/s ", _ordinary(book))
    if "poison" in report["measured"]:
        page = _with_table(page, "| failing ", _poison(book))
    if "xmin" in report["measured"]:
        page = _with_table(page, "| minute ", _xmin(book, report["options"]["minutes"]))
    return page


def _marks(report: Report) -> Iterable[Sequence[str]]:
    marks = {mark["name"]: mark for mark in report["marks"]}
    for goal in (one for one in GOALS if one.measure in report["measured"]):
        mark = marks.get(goal.name)
        # A mark of another goal says nothing of this one.
        if mark is None or mark["value"] is None or mark["goal"] != goal.text:
            yield goal.name, goal.text, "", "", "", "not measured"
            continue
        spread = _spread([mark["least"], mark["most"]], ".3g")
        reference = "" if mark["reference"] is None else _number(mark["reference"])
        met = "yes" if mark["met"] else "no"
        yield goal.name, goal.text, f"{mark['value']:.3g}", spread, reference, met


def _sources(report: Report) -> Iterable[Sequence[str]]:
    """Say of which commit the measures are, those of one together."""
    of: dict[tuple[str, str], list[str]] = {}
    for name, source in report["measured"].items():
        of.setdefault((source["commit"][:7], source["on"]), []).append(f"`{name}`")
    for (commit, day), names in of.items():
        yield commit, day, ", ".join(names)


def _results(book: Book) -> Iterable[Sequence[str]]:
    def of(measure: str, contestant: str, *names: str) -> str:
        found = book.rounds(measure, contestant)
        medians = (median(one[name] for one in found) for name in names)
        return ", ".join(map(_number, medians)) if found else ""

    single = of("latency", "ours, relay apart", "single_p50", "single_most")
    yield "a single event after a pause, p50 and most, ms", single, "with a relay apart"
    relay, alone, headers = (
        of("relay", who, "rate") for who in ("relay", "producer", "producer, headers")
    )
    remark = f"producer: {alone}; with headers: {headers}"
    yield "events/s of the relay alone", relay, remark
    pauses, without = (
        of("dropping", who, "during_pause_ms", "before_pause_ms") for who in ("ours", "nothing")
    )
    yield (
        "longest pause of consuming while retention drops, and before, ms",
        pauses,
        f"while it drops nothing: {without}",
    )


def _cores(book: Book) -> Iterable[Sequence[str]]:
    """Say how much of a core each process was at work, and for how long for a message."""
    for who in ("bare", "bare-orm", "ours", "ours-sql", "usual"):
        yield who, *_core(book.rounds("throughput", f"{who}, 1,000 keys"))
    for who in PEERS:
        if found := book.rounds("peers", who):
            yield who, *_core(found)


def _core(found: Sequence[Values]) -> Iterable[str]:
    """Yield rate, share of a core, and the µs of both processes for a message."""
    yield _number(median(one["rate"] for one in found))
    yield f"{median(one['rate'] * one['cpu_python'] / 1_000 for one in found):.2f}"
    yield from _costs(found)


def _costs(found: Sequence[Values]) -> Iterable[str]:
    """Yield the µs of both processes for a message."""
    for cpu in ("cpu_python", "cpu_postgres"):
        yield _number(1_000 * median(one[cpu] for one in found))


def _ordinary(book: Book) -> Iterable[Sequence[str]]:
    """Say at each rate on a dozen partitions what a message costs whom, and how long it takes."""
    costs = ("cpu_python", "cpu_postgres")
    for rate, who in product(RATES, (OURS, BARE_ORM)):
        found = book.rounds("ordinary", named_at(who, rate, MANY))
        if found:
            of = {name: median(one[name] for one in found) for name in found[0]}
            cells = [_number(1_000 * of[one]) for one in costs] + [f"{of['core']:.2f}"]
            cells += [_number(of[one]) for one in ("commits", "p50", "p99")]
            yield f"{rate:,}", who.name, *cells


def _poison(book: Book) -> Iterable[Sequence[str]]:
    """Say what a message costs where some fail, and the rate by CPU as a share of that of none."""
    for kind, share in (("", 0.0), *product(KINDS, SHARES)):
        runs = {keys: book.rounds("poison", named_failing(keys, kind, share)) for keys in KEYS}
        cells = [f"{share * 100:g} % {KINDS[kind]}" if kind else "none"]
        cells.append(_number(runs[KEYS[0]][0]["scans"]))
        for keys, found in runs.items():
            shares = ratios(found, book.rounds("poison", named_failing(keys)), "per_cpu")
            cells += [f"{median(shares):.2g}", *_costs(found)]
        yield cells


_XMIN = {
    **dict.fromkeys(("rate", "p50", "p99"), 1),
    **dict.fromkeys(("cpu_python", "cpu_postgres"), 1000),
    **{f"{table}_bytes": 1e-3 for table in ("position", "outbox_cursor", "backlog_lane", "parcel")},
    **{f"{table}_bytes": 1e-6 for table in ("inbox", "outbox")},
}
"""What the table says of each moment, and in which unit: 1/s, ms, µs, kB and MB."""


def _xmin(book: Book, minutes: float) -> Iterable[Sequence[str]]:
    """Say how figures change beside an open transaction, and without one."""
    sides = {who: book.rounds("xmin", who)[0] for who in SIDES}
    for moment, (who, found) in product(MOMENTS, sides.items()):
        state = "ended" if SIDES[who] and moment > CLOSED else who
        cells = (found[f"{of} at {moment}"] * unit for of, unit in _XMIN.items())
        yield f"{moment * minutes * LENGTH / MOMENTS[-1]:g}", state, *map(_number, cells)
    for who, found in sides.items():
        slopes = (found[f"{of} a minute"] * unit for of, unit in _XMIN.items())
        # 0 is added because it would be written as -0 otherwise.
        yield "each", who, *(_number(round(one, 2) + 0.0) for one in slopes)


def _with_table(page: str, header: str, rows: Iterable[Sequence[str]]) -> str:
    """Return the page with other rows in the table that begins so."""
    lines = page.splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if line.startswith(header))
    last = next(n for n in range(first, len(lines)) if not lines[n].startswith("|"))
    head = [cell.strip() for cell in lines[first].strip().strip("|").split("|")]
    table = [head, ["-" * len(cell) for cell in head], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table[1] = ["-" * width for width in widths]
    lines[first:last] = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |\n"
        for cells in table
    ]
    return "".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} – {max(values):{form}}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _book_of(report: Report) -> Book:
    return Book([Run(**run) for run in report["runs"]], series=report["series"])
