"""Databases of releases: restored from their dumps and upgraded, while the release's code runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.baked import RAW, ROOT, clean_environment
from tests.programs import lacking
from tests.release import CHANGELOG, DUMPS, dumps, released, unlisted, with_day

VERSIONS = sorted(path.stem for path in DUMPS.glob("*.sql"))
LISTED = sorted(one["version"] for one in released())


@pytest.fixture
def code(version: str, tmp_path: Path) -> Path:
    """The raw tree of a release."""
    [commit] = (one["commit"] for one in released() if one["version"] == version)
    require_commit(commit)
    archived = subprocess.check_output(["git", "archive", commit, RAW.name], cwd=ROOT)
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archived, check=True)
    return tmp_path / RAW.name


def require_commit(commit: str) -> None:
    """Skip the test, or fail it in CI, if this clone lacks a commit."""
    has = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    if subprocess.run(has, cwd=ROOT, capture_output=True).returncode != 0:
        lacking(f"this clone does not have the commit {commit} (git fetch --unshallow)")


def test_each_release_is_listed_with_its_commit_and_day() -> None:
    assert {*VERSIONS} - {*LISTED} == {*unlisted(released(), CHANGELOG.read_text("utf-8"))}
    assert {*LISTED} <= {*VERSIONS}
    for one in released():
        assert f"\n## {one['version']} ({one['day']})\n" in CHANGELOG.read_text("utf-8")
        require_commit(one["commit"])
        dump = f"tests/releases/{one['version']}.sql"
        adding = ["git", "log", "--diff-filter=A", "--format=%H", "--", dump]
        assert subprocess.check_output(adding, cwd=ROOT, text=True).split() == [one["commit"]]


@pytest.mark.full
def test_a_clone_without_tags_generates_from_a_release(tmp_path: Path) -> None:
    shown = re.findall(r"--checkout (\w+)", (ROOT / "README.md").read_text("utf-8"))
    [release] = (one for one in released() if one["commit"] in shown)
    require_commit(release["commit"])
    clone = ["git", "clone", "--quiet", "--no-tags", str(ROOT), str(tmp_path / "clone")]
    subprocess.run(clone, check=True)
    config = {"cookiecutters_dir": str(tmp_path / "c"), "replay_dir": str(tmp_path / "replay")}
    (tmp_path / "config.yaml").write_text(json.dumps(config), "utf-8")

    url = f"git+{(tmp_path / 'clone').as_uri()}"
    generate = [sys.executable, "-m", "cookiecutter", url, "--no-input"]
    given = ["--checkout", release["commit"], "--config-file", str(tmp_path / "config.yaml")]
    subprocess.run([*generate, *given], cwd=tmp_path, env=clean_environment(), check=True)

    record = json.loads((tmp_path / "parcel-tracker/.cookiecutter.json").read_text("utf-8"))
    assert (record["template_version"], record["commit"]) == (
        release["version"],
        release["commit"],
    )


@pytest.mark.integration
@pytest.mark.parametrize("version", VERSIONS)
def test_a_released_schema_is_migrated_to_that_of_a_new_database(version: str) -> None:
    """It fails if a migration is edited that was released."""
    dumps("upgrade", version, DUMPS / f"{version}.sql")


# The code of a release that is not listed yet is the present one.
@pytest.mark.full
@pytest.mark.integration
@pytest.mark.parametrize("version", LISTED)
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
def test_a_dump_is_reproducible_and_can_be_upgraded_while_code_runs(tmp_path: Path) -> None:
    made = dumps("make", "next")
    assert dumps("make", "next") == made
    dump = tmp_path / "next.sql"
    dump.write_text(made, "utf-8")

    dumps("upgrade", "next", dump, RAW)


def test_only_the_commit_of_a_release_contains_an_unlisted_release() -> None:
    listed = [{"version": "1.1.0"}]
    older = "## 1.1.0 (2026-01-01)\n\n- One.\n"

    assert unlisted(listed, f"# Changes\n\n{older}") == []
    assert unlisted(listed, f"# Changes\n\n## 1.2.0 (unreleased)\n\n- More.\n\n{older}") == []
    made = f"# Changes\n\n## 1.2.0 (2026-02-03)\n\n- More.\n\n{older}"
    assert unlisted(listed, made) == ["1.2.0"]


def test_a_release_needs_a_begun_version_and_gets_its_changelog_day() -> None:
    changelog = "# Changes\n\n## 1.2.0 (unreleased)\n\n- More.\n\n## 1.1.0 (2026-01-01)\n"

    assert with_day("1.2.0", changelog, "2026-02-03") == changelog.replace(
        "unreleased", "2026-02-03"
    )
    with pytest.raises(SystemExit, match=r"no heading `## 1.1.0 \(unreleased\)`"):
        with_day("1.1.0", changelog, "2026-02-03")
