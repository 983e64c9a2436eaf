"""What is kept of the measures: report and plots in docs/performance, and the pages about them.

    python -m benchmarks.kept       write plots and tables anew from the report that is kept

A measure compares only what has run beside each other, so each may be taken anew by itself; the
report says of which commit each is. Figures of an earlier engine are marked, those of one that has
changed more than `engine.OLDEST` times since are left out. A test compares, so the first change of
the engine after a measure has to write the tables anew.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks import engine, figures, tables
from benchmarks.marks import GOALS, Goal
from benchmarks.measures import MEASURES
from benchmarks.tables import Report
from demo.flights import ROOT

PLOTS = ROOT / "docs" / "performance"
REPORT = PLOTS / "report.json"
MEASURING = ROOT / "docs" / "measures.md"
PAGES = (ROOT / "docs" / "performance.md", MEASURING)


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
    REPORT.write_text(_as_text(whole), "utf-8")
    renew(whole)


def renew(report: Report) -> None:
    """Draw the plots of a report that is kept, delete all others, and write the pages."""
    left = shown(report, ages(report))
    plots = drawn(left)
    for earlier in PLOTS.glob("*.svg"):
        earlier.unlink()
    for plot, svg in plots.items():
        (PLOTS / plot).write_text(svg, "utf-8")
    for page, text in told(left).items():
        page.write_text(text, "utf-8")


def told(report: Report) -> dict[Path, str]:
    """Return the pages with tables and plots of what is shown of a report."""
    return tables.told({page: page.read_text("utf-8") for page in PAGES}, report)


def _kept() -> Report:
    """Return the report that is kept; nothing if there is none yet."""
    found: Report = json.loads(REPORT.read_text("utf-8")) if REPORT.exists() else {}
    return found


def write(report: Report, folder: Path) -> None:
    """Write a report, and the figures of what it holds."""
    (folder / "report.json").write_text(_as_text(report), "utf-8")
    for name, svg in figures.draw(tables.book_of(report)).items():
        (folder / name).write_text(svg, "utf-8")


def _as_text(report: Report) -> str:
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def ages(report: Report) -> dict[str, int | None]:
    """Return of each measure how often the engine has changed since; None if that is unknown."""
    measured = report["measured"]
    of = {one["commit"]: engine.changes_since(one["commit"]) for one in measured.values()}
    return {name: of[source["commit"]] for name, source in measured.items()}


def shown(report: Report, ages: Mapping[str, int | None]) -> Report:
    """Return what may be shown of a report: without measures of an engine that is too old."""
    staying = {name for name, age in ages.items() if age is not None and age <= engine.OLDEST}
    marks = {mark["name"]: mark for mark in report["marks"]}
    return {
        **report,
        "measured": {name: one for name, one in report["measured"].items() if name in staying},
        "marks": [
            _judged(marks[goal.name], goal)
            for goal in GOALS
            if goal.name in marks and goal.measure in staying
        ],
        "runs": [one for one in report["runs"] if one["measure"] in staying],
        "series": {
            name: points
            for name, points in report["series"].items()
            if name.startswith(tuple(staying))
        },
        "earlier": sorted(name for name in staying if ages[name]),
    }


def _judged(mark: dict[str, Any], goal: Goal) -> dict[str, Any]:
    """Return a mark beside its goal of today, which may have another bound."""
    if mark["unit"] != goal.unit:
        return mark
    return {**mark, "goal": goal.text, "met": goal.is_met_by(mark["value"])}


def drawn(report: Report) -> dict[str, str]:
    """Return the plots of what is shown, by file name."""
    sources = {
        name: f"{one['commit'][:7]}, an earlier engine"
        if name in report["earlier"]
        else one["commit"][:7]
        for name, one in report["measured"].items()
    }
    return figures.draw(tables.book_of(report), sources)


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


if __name__ == "__main__":
    renew(_kept())
