"""Find migrations that break running code: `python dev/lint_migrations.py`, without a database.

Squawk lints the SQL of each revision in `migrations`. If a revision has to break a rule, it says
why: `accepts = {"ban-drop-column": "no release reads it any more"}`. The exit code is 1 if it
breaks another one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.environment import EnvironmentContext
from alembic.script import Script, ScriptDirectory

ROOT = Path(__file__).resolve().parents[1]
SQUAWK = Path(sysconfig.get_path("scripts"), "squawk")

NOT_LINTED = (
    *("ban-char-field", "prefer-bigint-over-int", "prefer-bigint-over-smallint"),
    *("prefer-identity", "prefer-text-field", "prefer-timestamp-tz", "require-enum-value-ordering"),
    # A migration is one transaction. IF NOT EXISTS would keep an invalid index.
    "prefer-robust-stmts",
    # Transactions of the service are short, and are repeated if they wait for too long.
    *("require-lock-timeout", "require-statement-timeout"),
)
"""Rules of style, and those that do not fit."""

_REPLACE = "Add a new one, write both, copy the old rows, read the new one, drop the old one"
_CONCURRENTLY = "Use postgresql_concurrently=True in an autocommit_block"
_LAST = "Do it when no process of a release that relies on it is left, and accept the rule"
ADVICE = {
    "adding-required-field": "Add it as nullable, or with a server_default: running code inserts"
    " rows without it",
    "adding-not-nullable-field": "Add CHECK (… IS NOT NULL) as NOT VALID, backfill the rows,"
    " validate it in the next migration, then SET NOT NULL and accept the rule",
    "ban-concurrent-index-creation-in-transaction": _CONCURRENTLY,
    "changing-column-type": _REPLACE,
    "constraint-missing-not-valid": "Add it as NOT VALID, and validate it in the next migration."
    " For a unique one build an index concurrently, and add the constraint USING INDEX",
    "renaming-column": _REPLACE,
    "renaming-table": _REPLACE,
    "require-concurrent-index-creation": _CONCURRENTLY,
    "require-concurrent-index-deletion": _CONCURRENTLY,
}
"""What to do, in place of squawk's own help; rules without either have `_LAST`."""

_BLOCKING = re.compile(
    r"(?im)^\s*((LOCK|TRUNCATE|CLUSTER|VACUUM\s*\(?\s*FULL|REFRESH\s+MATERIALIZED\s+VIEW(?!\s+CONC)"
    r"|ALTER\s+TABLE\b.*\bSET\s+(LOGGED|UNLOGGED|TABLESPACE))\b.*)"
)
_BLOCKS = (
    "It blocks all who use the table, until it has rewritten it or the migration ends. Do without,"
    " or stop the service for it, and accept the rule."
)
"""What is said of such statements, for which squawk has no rules."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule that a revision breaks."""

    rule: str
    text: str


def lint(revision: Script, config: Config, scripts: ScriptDirectory) -> Iterator[Fault]:
    """Yield the faults of a revision, without those that it accepts."""
    found = list(_faults(revision, config, scripts))
    accepts = getattr(revision.module, "accepts", {})
    if not isinstance(accepts, dict) or not all(
        isinstance(reason, str) and reason.strip() for reason in accepts.values()
    ):
        yield Fault("accepts", "It must be a dictionary with a reason for each rule.")
        accepts = {}
    yield from (fault for fault in found if fault.rule not in accepts)
    for rule in sorted(accepts.keys() - {fault.rule for fault in found}):
        yield Fault("accepts", f"No statement breaks the rule {rule!r}: remove or correct it.")


def _faults(revision: Script, config: Config, scripts: ScriptDirectory) -> Iterator[Fault]:
    sql = StringIO()
    with EnvironmentContext(config, scripts, as_sql=True) as environment:
        environment.configure(
            dialect_name="postgresql",
            dialect_opts={"paramstyle": "numeric_dollar"},
            output_buffer=sql,
        )
        context = environment.get_context()
        with context.begin_transaction(), Operations.context(context):
            try:
                revision.module.upgrade()
            except Exception as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
                yield Fault(
                    "not-rendered",
                    f"It has no SQL without a database ({why}). Use op.execute, or accept the rule:"
                    " then only the statements before are linted.",
                )
    yield from _squawk(sql.getvalue())
    for found in _BLOCKING.finditer(sql.getvalue()):
        yield Fault("blocking-table", f"{found[1].strip()}\n    {_BLOCKS}")


def _squawk(sql: str) -> Iterator[Fault]:
    """Yield what squawk finds. Raises `SystemExit` if it fails."""
    options = ("--config", os.devnull, "--reporter", "json", "--exclude", ",".join(NOT_LINTED))
    done = subprocess.run([SQUAWK, *options], input=sql, capture_output=True, encoding="utf-8")
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    lines = sql.split("\n")
    for found in json.loads(done.stdout):
        rule = found["rule_name"]
        advice = ADVICE.get(rule) or found["help"] or _LAST
        said = f"{found['message']} {advice}".removesuffix(".")
        yield Fault(rule, f"{lines[found['line']].strip()}\n    {said}.")


def main() -> None:
    """Run the command line."""
    if not SQUAWK.exists():
        print("squawk is not installed, so migrations are not checked", file=sys.stderr)
        return
    config = Config(ROOT / "alembic.ini")
    scripts = ScriptDirectory.from_config(config)
    faults = [
        f"{Path(revision.path).relative_to(ROOT)}: {fault.rule}\n    {fault.text}"
        for revision in reversed(list(scripts.walk_revisions()))
        if Path(revision.path).is_relative_to(ROOT / "migrations")
        for fault in lint(revision, config, scripts)
    ]
    if faults:
        how = "See docs/releases.md#migrations. If a migration may break a rule, it says why:"
        sys.exit("\n".join([*faults, how + '\n    accepts = {"rule": "reason"}']))


if __name__ == "__main__":
    main()
