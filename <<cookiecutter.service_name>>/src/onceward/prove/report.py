"""The report: a file for programs, and one for people."""

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from onceward.redaction import redact
from onceward.settings import Settings

from .run import Result

_STYLE = (
    "body{font:15px/1.5 system-ui;max-width:60em;margin:2em auto;padding:0 1em}"
    "td,th{padding:.1em 1em .1em 0;text-align:left}pre{background:#8881;padding:1em;overflow:auto}"
)


def described(result: Result, settings: Settings, **more: object) -> dict[str, Any]:
    """Return the report as JSON, without secrets."""
    commit = None
    with suppress(OSError):  # there is no git
        revision = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(revision, capture_output=True, text=True).stdout.strip() or None
    found = {
        "verdict": result.verdict,
        "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        **more,
        "commit": commit,
        "python": platform.python_version(),
        "servers": [settings.postgresql, settings.kafka],
        **asdict(result),
        "no verdict because": result.unmet if result.verdict == "no verdict" else [],
    }
    clean: dict[str, Any] = json.loads(redact(json.dumps(found, default=str)))
    return clean


def write(folder: Path, found: Mapping[str, Any], diffs: Iterable[str]) -> None:
    """Write `report.json` and `report.html`."""
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    facts = {
        name: value
        for name, value in found.items()
        if name not in ("verdict", "faults", "applied", "differences") and value not in ([], None)
    }
    faults = (
        (name, one["caused"], one["hit"], f"{one['recovery']:.1f} s" if one["recovery"] else "")
        for name, one in found["faults"].items()
    )
    parts = (
        f"<!doctype html><meta charset=utf-8><title>{_text(found['verdict'])}</title>",
        f"<style>{_STYLE}</style><h1>{_text(found['verdict'])}</h1>",
        _table(facts.items()),
        "<h2>Faults</h2>",
        _table(faults, "fault", "caused", "hit an open transaction", "longest recovery"),
        "<h2>Applied messages</h2>",
        _table(found["applied"].items(), "consumer: type", "messages"),
        *(f"<pre>{_text(redact(one))}</pre>" for one in diffs),
    )
    (folder / "report.html").write_text("\n".join(parts), "utf-8")


def _table(rows: Iterable[Iterable[object]], *names: str) -> str:
    head = "".join(f"<th>{_text(one)}" for one in names)
    lines = ("".join(f"<td>{_text(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{head}{''.join(f'<tr>{one}' for one in lines)}</table>"


def _text(value: object) -> str:
    return escape(", ".join(map(str, value)) if isinstance(value, list) else str(value))
