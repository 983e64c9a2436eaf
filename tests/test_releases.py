"""Databases of releases: restored from their dumps and upgraded, while the release's code runs."""

import subprocess
from pathlib import Path

import pytest

from tests.baked import RAW, ROOT
from tests.programs import lacking
from tests.release import DUMPS, dumps, released

VERSIONS = sorted(path.stem for path in DUMPS.glob("*.sql"))


@pytest.fixture
def code(version: str, tmp_path: Path) -> Path:
    """The raw tree of a release."""
    archived = subprocess.run(
        ["git", "archive", f"v{version}", RAW.name], cwd=ROOT, capture_output=True
    )
    if archived.returncode != 0:
        lacking(f"this clone has no tag v{version} (git fetch --tags)")
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archived.stdout, check=True)
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


@pytest.mark.full
@pytest.mark.integration
def test_a_dump_of_this_version_is_the_same_each_time_and_can_be_upgraded(tmp_path: Path) -> None:
    made = dumps("make", "next")
    assert dumps("make", "next") == made
    for table in ("backlog", "inbox_g1", "inbox_filter", "outbox_p20260101", "scheduled"):
        assert f"INSERT INTO pipeline.{table} " in made
    dump = tmp_path / "next.sql"
    dump.write_text(made, "utf-8")

    dumps("upgrade", "next", dump, RAW)


def test_a_release_has_the_day_in_the_changelog_and_its_version_must_be_begun() -> None:
    changelog = "# Changes\n\n## 1.2.0 (unreleased)\n\n- More.\n\n## 1.1.0 (2026-01-01)\n"

    assert released("1.2.0", changelog, "2026-02-03") == changelog.replace(
        "unreleased", "2026-02-03"
    )
    with pytest.raises(SystemExit, match=r"no heading `## 1.1.0 \(unreleased\)`"):
        released("1.1.0", changelog, "2026-02-03")
