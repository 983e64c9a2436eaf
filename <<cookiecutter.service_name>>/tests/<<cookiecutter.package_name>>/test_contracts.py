"""The schemas in `contracts/`, which others rely on, against the code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "format"), [("events.json", "json-schema"), ("asyncapi.json", "asyncapi")]
)
def test_the_committed_schemas_are_those_of_the_code(file: str, format: str) -> None:
    # In a process of its own: events that tests declare are not among them.
    command = ["-m", "<<cookiecutter.package_name>>", "schema", "export", "--format", format]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True
    )
    advice = f"contracts/{file} is stale: run `make schema`, and commit what it writes"
    assert done.stdout.decode() == (ROOT / "contracts" / file).read_text("utf-8"), advice
