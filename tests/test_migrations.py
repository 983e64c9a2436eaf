"""`make check` of a generated service: migrations that would break running code."""

import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent, indent

import pytest

from tests.baked import BakedProject, Template

LINT = "dev/lint_migrations.py"
VERSIONS = Path("migrations", "versions")


@pytest.fixture(scope="module")
def project(template: Template, tmp_path_factory: pytest.TempPathFactory) -> BakedProject:
    """A service to which each test adds migrations."""
    return template.bake(tmp_path_factory.mktemp("migrations"))


def write(project: BakedProject, *bodies: str, accepts: Sequence[str] = ()) -> list[str]:
    """Write migrations in place of those of earlier calls, and return their paths."""
    for old in (project.path / VERSIONS).glob("added_*.py"):
        old.unlink()
    paths = [VERSIONS / f"added_{number}.py" for number in range(len(bodies))]
    down = "service_0001"
    for path, body, accepted in zip(paths, bodies, accepts or [""] * len(paths), strict=True):
        accepting = f"accepts = {accepted}\n" if accepted else ""
        (project.path / path).write_text(
            '"""A later migration."""\n\nimport sqlalchemy as sa\nfrom alembic import op\n\n'
            f'revision = "{path.stem}"\ndown_revision = "{down}"\n{accepting}\n\n'
            f'def upgrade() -> None:\n    """Apply it."""\n{indent(body, "    ")}\n',
            "utf-8",
        )
        down = path.stem
    return [path.as_posix() for path in paths]


def lint(project: BakedProject) -> subprocess.CompletedProcess[str]:
    """Lint the migrations of a service as `make check` does."""
    return subprocess.run(
        [sys.executable, LINT],
        cwd=project.path,
        env={"PYTHONPATH": str(project.path / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def faults(said: str) -> list[tuple[str, str, str]]:
    """Return the path, the rule and the text of each fault."""
    return re.findall(r"^(\S+\.py): (\S+)\n((?:    .*\n)+)", said, re.MULTILINE)


@pytest.mark.parametrize("example", ["parcels", "payments", "none"])
def test_the_first_migration_passes(template: Template, output: Path, example: str) -> None:
    done = lint(template.bake(output, worked_example=example, personal_data="yes"))

    assert (done.returncode, done.stdout) == (0, "")


BREAKING = [
    (
        'op.add_column("parcel", sa.Column("weight", sa.Integer, nullable=False))',
        "adding-required-field",
        "ALTER TABLE parcel ADD COLUMN weight INTEGER NOT NULL",
        "nullable, or with a server_default",
    ),
    (
        'op.execute("ALTER TABLE parcel ADD COLUMN code UUID DEFAULT gen_random_uuid()")',
        "adding-field-with-default",
        "ALTER TABLE parcel ADD COLUMN code UUID DEFAULT gen_random_uuid()",
        "backfill",
    ),
    (
        'op.alter_column("parcel", "last_scanned_at", nullable=False)',
        "adding-not-nullable-field",
        "ALTER TABLE parcel ALTER COLUMN last_scanned_at SET NOT NULL",
        "NOT VALID",
    ),
    (
        'op.drop_column("parcel", "place")',
        "ban-drop-column",
        "ALTER TABLE parcel DROP COLUMN place",
        "no process of a release that relies on it is left",
    ),
    (
        'op.drop_table("parcel")',
        "ban-drop-table",
        "DROP TABLE parcel",
        "no process of a release that relies on it is left",
    ),
    (
        'op.alter_column("parcel", "place", new_column_name="hub")',
        "renaming-column",
        "ALTER TABLE parcel RENAME place TO hub",
        "write both",
    ),
    (
        'op.rename_table("parcel", "package")',
        "renaming-table",
        "ALTER TABLE parcel RENAME TO package",
        "write both",
    ),
    (
        'op.alter_column("parcel", "scans", type_=sa.BigInteger)',
        "changing-column-type",
        "ALTER TABLE parcel ALTER COLUMN scans TYPE BIGINT",
        "write both",
    ),
    (
        'op.create_index("parcel_place_idx", "parcel", ["place"])',
        "require-concurrent-index-creation",
        "CREATE INDEX parcel_place_idx ON parcel (place)",
        "postgresql_concurrently=True",
    ),
    (
        'op.create_index("parcel_place_idx", "parcel", ["place"], postgresql_concurrently=True)',
        "ban-concurrent-index-creation-in-transaction",
        "CREATE INDEX CONCURRENTLY parcel_place_idx ON parcel (place)",
        "autocommit_block",
    ),
    (
        'op.drop_index("parcel_place_idx", "parcel")',
        "require-concurrent-index-deletion",
        "DROP INDEX parcel_place_idx",
        "postgresql_concurrently=True",
    ),
    (
        'op.create_check_constraint("parcel_scans_check", "parcel", "scans > 0")',
        "constraint-missing-not-valid",
        "ALTER TABLE parcel ADD CONSTRAINT parcel_scans_check CHECK (scans > 0)",
        "NOT VALID",
    ),
    *(
        (f'op.execute("{statement}")', "blocking-table", statement, "stop the service for it")
        for statement in (
            "LOCK TABLE parcel IN EXCLUSIVE MODE",
            "TRUNCATE parcel",
            "CLUSTER parcel USING parcel_pkey",
            "VACUUM (FULL) parcel",
            "ALTER TABLE parcel SET LOGGED",
            "REFRESH MATERIALIZED VIEW parcels_of_a_day",
        )
    ),
    (
        'op.execute("SELECT 1 FROM")',
        "syntax-error",
        "SELECT 1 FROM",
        "",
    ),
    (
        'op.get_bind().execute(sa.text("SELECT 1")).scalar_one()',
        "not-rendered",
        "'NoneType' object has no attribute 'scalar_one'",
        "op.execute",
    ),
]


def test_a_migration_that_breaks_running_code_is_named(project: BakedProject) -> None:
    bodies, rules, statements, advice = zip(*BREAKING, strict=True)
    paths = write(project, *bodies)

    done = lint(project)

    assert done.returncode == 1
    found = faults(done.stdout)
    assert [(path, rule) for path, rule, _ in found] == list(zip(paths, rules, strict=True))
    for (_, _, text), statement, todo in zip(found, statements, advice, strict=True):
        assert statement in text
        assert todo in text


def test_a_migration_accepts_what_it_breaks_with_a_reason(project: BakedProject) -> None:
    bodies, rules, _, _ = zip(*BREAKING, strict=True)
    write(project, *bodies, accepts=[f"{{'{rule}': 'the service is stopped'}}" for rule in rules])

    done = lint(project)

    assert (done.returncode, done.stdout) == (0, "")


def test_all_faults_of_a_migration_are_named(project: BakedProject) -> None:
    [path] = write(project, 'op.drop_table("parcel")\nop.rename_table("a", "b")')

    found = faults(lint(project).stdout)

    assert [each[:2] for each in found] == [(path, "ban-drop-table"), (path, "renaming-table")]


def test_migrations_under_which_older_code_runs_pass(project: BakedProject) -> None:
    write(
        project,
        'op.add_column("parcel", sa.Column("note", sa.Text))',
        'op.add_column("parcel", sa.Column("weight", sa.Integer,'
        ' server_default="0", nullable=False))',
        'op.create_table("hub", sa.Column("id", sa.Text, nullable=False),'
        ' sa.ForeignKeyConstraint(["id"], ["parcel.id"]))\n'
        'op.create_index("hub_id_idx", "hub", ["id"])',
        'op.create_check_constraint("c", "parcel", "scans > 0", postgresql_not_valid=True)',
        'op.execute("ALTER TABLE parcel VALIDATE CONSTRAINT c")',
        'op.execute("REFRESH MATERIALIZED VIEW CONCURRENTLY parcels_of_a_day")',
        'op.execute(sa.table("parcel", sa.column("place")).update().values(place="100 %"))',
        'op.bulk_insert(sa.table("hub", sa.column("id", sa.Text)), [{"id": "100 %"}])',
    )

    done = lint(project)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("page", ["releases", "existing-database"])
def test_the_migration_of_a_page_passes(project: BakedProject, page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", project.read(f"docs/{page}.md"), re.DOTALL)
    [shown] = [block for block in blocks if "def upgrade()" in block]
    write(project, dedent(shown.partition("def upgrade() -> None:\n")[2]))

    done = lint(project)

    assert (done.returncode, done.stdout) == (0, "")


def test_what_a_migration_accepts_is_a_rule_that_it_breaks(project: BakedProject) -> None:
    wrong = {
        "{'ban-drop-colum': 'no release reads it'}": "breaks the rule 'ban-drop-colum'",
        "{'ban-drop-table': 'no release reads it'}": "breaks the rule 'ban-drop-table'",
        "{'ban-drop-column': ' '}": "a reason for each rule",
        "['ban-drop-column']": "a reason for each rule",
    }
    paths = write(project, *['op.drop_column("parcel", "place")'] * len(wrong), accepts=list(wrong))

    done = lint(project)

    assert done.returncode == 1
    found = faults(done.stdout)
    assert {each[:2] for each in found if each[1] != "accepts"} == {
        (path, "ban-drop-column") for path in paths
    }
    said = [(path, text) for path, rule, text in found if rule == "accepts"]
    assert [path for path, _ in said] == paths
    assert all(part in text for (_, text), part in zip(said, wrong.values(), strict=True))


def test_a_machine_that_squawk_is_not_made_for_does_without(
    project: BakedProject, tmp_path: Path
) -> None:
    write(project, 'op.drop_table("parcel")')
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    imported = f"{project.path / 'src'}:{sysconfig.get_path('purelib')}"

    said = project.run(tmp_path / "venv" / "bin" / "python", LINT, PYTHONPATH=imported)

    assert "squawk is not installed" in said
    assert "not checked" in said


@pytest.mark.full
def test_make_check_fails_by_a_migration_that_breaks_running_code(project: BakedProject) -> None:
    [path] = write(project, 'op.drop_table("parcel")')
    project.make("format")
    with pytest.raises(pytest.fail.Exception, match=f"{path}: ban-drop-table"):
        project.make("check")
    reason = "no release reads it, and none that is older will ever be deployed again"
    [path] = write(
        project, 'op.drop_table("parcel")', accepts=[f'{{"ban-drop-table": "{reason}"}}']
    )
    assert max(map(len, project.read(path).splitlines())) > 100, "only the formatter mends that"
    project.make("format", "check")
