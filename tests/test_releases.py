"""Databases of releases: restored from their dumps and upgraded, while the release's code runs."""

import subprocess
from pathlib import Path

import pytest

from tests.baked import RAW, ROOT
from tests.programs import lacking
from tests.release import DUMPS, dumps, with_day

VERSIONS = sorted(path.stem for path in DUMPS.glob("*.sql"))


@pytest.fixture
def code(version: str, tmp_path: Path) -> Path:
    """The raw tree of a release: that of the commit with its dump."""
    dump = f"tests/releases/{version}.sql"
    adding = ["git", "log", "-1", "--diff-filter=A", "--format=%H", "--", dump]
    commit = subprocess.check_output(adding, cwd=ROOT, text=True).strip()
    if not commit:
        lacking(f"this clone does not have the commit of {dump} (git fetch --unshallow)")
    archived = subprocess.check_output(["git", "archive", commit, RAW.name], cwd=ROOT)
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archived, check=True)
    return tmp_path / RAW.name


@pytest.mark.integration
@pytest.mark.parametrize("version", VERSIONS)
def test_a_released_schema_is_migrated_to_that_of_a_new_database(version: str) -> None:
    """It fails if a migration is edited that was released."""
    dumps("upgrade", version, DUMPS / f"{version}.sql")


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.parametrize("version", VERSIONS)
def test_a_released_database_is_upgraded_while_the_code_of_its_release_runs(
    version: str, code: Path
) -> None:
    dumps("upgrade", version, DUMPS / f"{version}.sql", code)


@pytest.mark.integration
def test_a_dump_of_this_version_has_rows_and_can_be_upgraded(tmp_path: Path) -> None:
    made = dumps("make", "next")
    for table in ("backlog", "inbox_g1", "outbox_p20260101", "scheduled"):
        assert f"INSERT INTO pipeline.{table} " in made
    dump = tmp_path / "next.sql"
    dump.write_text(made, "utf-8")

    dumps("upgrade", "next", dump)


@pytest.mark.full
@pytest.mark.integration
def test_a_dump_is_the_same_each_time_and_is_upgraded_while_code_runs(tmp_path: Path) -> None:
    made = dumps("make", "next")
    assert dumps("make", "next") == made
    dump = tmp_path / "next.sql"
    dump.write_text(made, "utf-8")

    dumps("upgrade", "next", dump, RAW)


def test_a_release_has_the_day_in_the_changelog_and_its_version_must_be_begun() -> None:
    changelog = "# Changes\n\n## 1.2.0 (unreleased)\n\n- More.\n\n## 1.1.0 (2026-01-01)\n"

    assert with_day("1.2.0", changelog, "2026-02-03") == changelog.replace(
        "unreleased", "2026-02-03"
    )
    with pytest.raises(SystemExit, match=r"no heading `## 1.1.0 \(unreleased\)`"):
        with_day("1.1.0", changelog, "2026-02-03")
