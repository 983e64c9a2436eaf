"""The tutorial, followed word by word."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.baked import DEFAULTS, ROOT, BakedProject, Template, clean_environment
from tests.test_bake import bash, running, until

PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
BLOCKS = re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
"""What stands before each block, its language and what it shows."""
ENVIRONMENT = 'eval "$(.venv/bin/python dev/stack.py env)"\n'


def follow(project: BakedProject, before: str, code: str) -> None:
    """Write code to the place that the text before it names."""
    if "to the imports" in before:
        file = project.path / "src" / "parcel_tracker" / "handlers.py"
        text = file.read_text("utf-8")
        for line in code.split("\n"):
            module = line.partition(" import ")[0]
            text = re.sub(rf"^{re.escape(module)} import .*$", line, text, flags=re.MULTILINE)
        file.write_text(text, "utf-8")
        return
    (how, name) = re.findall(r"(at the end of|in a new file) `((?:src|tests)/\S+\.py)`", before)[-1]
    file = project.path / name
    assert file.exists() == (how == "at the end of")
    file.write_text(f"{file.read_text('utf-8')}\n\n{code}" if file.exists() else code, "utf-8")


def test_a_service_is_generated_by_the_commands_of_the_read_me() -> None:
    (_, _, generating), *_ = BLOCKS
    repository, *generate, enter, run = generating.splitlines()
    shown = f"```sh\n{repository}\n{' && '.join(generate)}\n{enter} && {run}\n```\n"
    assert shown in (ROOT / "README.md").read_text("utf-8")


def test_the_tutorial_shows_what_the_test_below_follows() -> None:
    assert [kind for _, kind, _ in BLOCKS].count("python") == 5
    assert ENVIRONMENT in PAGE
    assert sum("Repeat the command" in before for before, _, _ in BLOCKS) == 1
    assert sum("Stop the service" in before for before, _, _ in BLOCKS) == 1
    assert sum("`make run` creates" in before for before, _, _ in BLOCKS) == 1


@pytest.mark.full
@pytest.mark.integration
def test_the_tutorial_is_true_word_by_word(template: Template, tmp_path: Path) -> None:
    (_, _, generating), *blocks = BLOCKS
    # Cookiecutter is here; tests/test_guides.py installs it.
    repository, *_, generate, enter, run = generating.splitlines()
    assert (enter, run) == ("cd parcel-tracker", "make run")
    generate = generate.removeprefix("env/bin/")
    repository = repository.replace("../onceward", shlex.quote(str(template.path)))
    configured = f"--config-file {shlex.quote(str(template.home / 'config.yaml'))}"
    done = subprocess.run(
        ["bash", "-euc", f"{repository}\n{generate} {configured}"],
        cwd=tmp_path,
        env=clean_environment() | {"PATH": f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    project = BakedProject(tmp_path / "parcel-tracker", DEFAULTS)
    project.run("make", "setup")

    said, sent = "", ""
    with ExitStack() as service:
        service.enter_context(running(project))
        told = bash(project, ".venv/bin/python dev/stack.py env").stdout
        variables = dict(re.findall(r"^export (\w+)='?(.*?)'?$", told, re.MULTILINE))
        for before, kind, code in blocks:
            if "Repeat the command" in before:
                assert "nothing was published" in bash(project, sent, **variables).stdout
            if "Stop the service" in before:
                service.close()
            if "`make run` creates" in before:
                service.enter_context(running(project))
            if kind == "python":
                follow(project, before, code)
            elif kind == "text":
                assert [line for line in code.splitlines() if line not in said] == []
            else:
                sent = code
                done = bash(project, code, **variables)
                said = done.stdout
                assert done.returncode == 0, said
            if kind == "sh" and code.rstrip().endswith("service dead list"):
                reason = "rejected" if "Without a signature" in before else "identity mismatch"
                until(project, ".venv/bin/service dead list", reason, **variables)
            if "Discard it" in before and kind == "sh":
                assert "discarded 1 of 1" in said
