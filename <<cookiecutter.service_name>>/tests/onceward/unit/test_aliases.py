"""Old names of packages, each in a separate process: an import cannot be undone."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import onceward

ENGINE = Path(onceward.__file__).parent
NAMES: dict[str, str] = json.loads((ENGINE / "renamed.json").read_text("utf-8"))


def run(program: str, *more: Path, warnings: str = "ignore") -> str:
    """Run a program that can import the engine, and return what it prints."""
    folders = [*more, ENGINE.parent]
    done = subprocess.run(
        [sys.executable, f"-W{warnings}", "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("old", NAMES)
def test_an_old_name_gives_the_module_with_the_new_one(old: str) -> None:
    if find_spec(new := NAMES[old]) is None:
        pytest.skip(f"{new} is not part of this service")
    program = f"""
import onceward
from importlib import import_module
import {old}
new = import_module("{new}")
print({old} is new, new.__spec__.name, new.__name__)
"""
    assert run(program) == f"True {new} {new}\n"


def test_a_module_is_loaded_once_whatever_its_name_is() -> None:
    program = """
import onceward
from pipeline.apply.inbox import TooOld
import pipeline.apply.inbox
import onceward.apply.inbox as new
print(pipeline.apply.inbox is new, new.__spec__.name, new.TooOld is TooOld)
"""
    assert run(program) == "True onceward.apply.inbox True\n"


def test_the_warning_names_the_new_name_and_the_line_of_the_import() -> None:
    said = run("import onceward\n\nfrom operate.errors import __doc__", warnings="default")
    assert "<string>:3: DeprecationWarning: the module operate is now onceward.cli" in said
    assert "the module operate.errors is now onceward.cli.errors" in said


def test_a_setting_with_an_old_name_is_resolved() -> None:
    program = """
import onceward
from pkgutil import resolve_name
print(resolve_name("pipeline.schema:SCHEMA"))
"""
    assert run(program) == "pipeline\n"


@pytest.mark.parametrize("name", ["archive.py", "archive/__init__.py"])
def test_a_module_of_the_service_takes_precedence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("MINE = True\n", "utf-8")
    assert run("import onceward\nimport archive\nprint(archive.MINE)", tmp_path) == "True\n"


def test_a_folder_that_an_update_has_left_does_not(tmp_path: Path) -> None:
    (tmp_path / "pipeline" / "__pycache__").mkdir(parents=True)
    program = "import onceward\nimport pipeline\nprint(pipeline is onceward)"
    assert run(program, tmp_path) == "True\n"


def test_a_module_that_no_version_had_is_missed_by_both_names() -> None:
    said = run("import onceward\nimport pipeline.nothing")
    assert "No module named 'pipeline.nothing', which is now 'onceward.nothing'" in said
