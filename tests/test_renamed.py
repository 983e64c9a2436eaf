"""Services of version 1, with edits of their owners, under the names of version 2."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.baked import RAW
from tests.test_update import (  # noqa: F401 (a fixture)
    AGES,
    UPDATE,
    History,
    commit,
    conflicts,
    grown,
    owned,
    run,
    without_unmarked,
)

NAMES = json.loads((RAW / "src" / "onceward" / "renamed.json").read_text("utf-8"))
OLD = re.compile(rf"(?m)^(?:from|import) ({'|'.join(NAMES)})\b")
OWN = '''"""Ada's own module."""

from operate.output import write

from pipeline import Reject
from pipeline.settings import Settings

QUERY = "SELECT count(*) FROM pipeline.backlog"


def show(settings: Settings) -> None:
    """Write the group."""
    write(settings.kafka_bootstrap_servers)
    if not QUERY:
        raise Reject("nothing")
'''
TEST = '''"""A test of Ada's."""

import pytest


def test_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.settings.Settings", None)
'''


@pytest.mark.full
@pytest.mark.parametrize("answers", [(), ("engine=package",)], ids=["source", "package"])
@pytest.mark.parametrize("age", [AGES[0], AGES[-1]])
def test_a_service_of_version_1_is_updated_with_its_own_modules(
    grown: History,  # noqa: F811
    output: Path,
    age: int,
    answers: tuple[str, ...],
) -> None:
    old, baked = grown.bake_aged(output, age)
    if not (baked.path / "src" / "pipeline").exists():
        pytest.skip("commits of this age have the new names")
    project = without_unmarked(owned(baked))
    package = project.path / "src" / project.package
    (package / "own.py").write_text(OWN, "utf-8")
    test = project.path / "tests" / project.package / "test_own.py"
    test.write_text(TEST, "utf-8")
    commit(project.path, "Ada's modules")

    options = (f"--template={grown.template.path}", f"--from={old}", f"--to={grown.new}")
    outcome = run(project.path, sys.executable, str(UPDATE), *options, *answers)

    assert "Packages have new names" in outcome.said
    assert not (project.path / "src" / "pipeline" / "__init__.py").exists()
    own = (package / "own.py").read_text("utf-8")
    assert "from onceward.cli.output import write" in own
    assert "FROM pipeline.backlog" in own
    assert '"onceward.settings.Settings"' in test.read_text("utf-8")
    aside = conflicts(project)
    left = [
        name
        for name, content in project.files().items()
        if name.endswith(".py") and name not in aside and OLD.search(content.decode())
    ]
    assert left == []
    if not aside and not answers:
        program = f"import {project.package}.main, {project.package}.own"
        folders = {"PYTHONPATH": str(project.path / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = run(project.path, sys.executable, "-Werror:the module", "-c", program, **folders)
        assert done.code == 0, done.said
