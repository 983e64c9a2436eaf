"""Generated services, baked as a user bakes them, for tests that look at them and run them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RAW = ROOT / "<<cookiecutter.service_name>>"

DEFAULTS = {
    "service_name": "parcel-tracker",
    "package_name": "parcel_tracker",
    "description": "An event-driven service with an inbox and an outbox",
    "author": "Your Team <team@example.org>",
    "worked_example": "parcels",
    "outside_calls": "yes",
    "object_store": "yes",
    "schema_registry": "no",
    "personal_data": "no",
    "operations_page": "yes",
    "history": "yes",
    "http_api": "no",
    "debezium": "no",
    "engine_tests": "no",
    "engine": "source",
}
"""The answers of `--no-input`."""


def names_of_tests(files: Mapping[str, str]) -> set[str]:
    """Return the names of the test modules and functions in files, which are texts by path."""
    functions = (name for text in files.values() for name in re.findall(r"def (test_\w+)\(", text))
    return {*(Path(path).stem for path in files), *functions}


EXAMPLES = ("parcels", "payments", "none")
"""The answers about the worked example."""

ENGINES = ("source", "package")
"""The answers about where the engine comes from."""


def manifest() -> dict[str, list[str]]:
    """Return what goes when an optional feature, or a worked example, is not chosen."""
    read: dict[str, list[str]] = json.loads((RAW / ".features.json").read_text("utf-8"))
    return read


def features() -> dict[str, list[str]]:
    """Return the part of the manifest for optional features, which are chosen by yes and no."""
    return {name: paths for name, paths in manifest().items() if name not in EXAMPLES}


def is_chosen(name: str, answers: Mapping[str, str]) -> bool:
    """Return whether answers choose an entry of the manifest."""
    return answers["worked_example"] == name if name in EXAMPLES else answers[name] == "yes"


def variants() -> Iterator[dict[str, str]]:
    """Yield answers: every optional feature, and each without the others.

    Of three and more any two are seen together, one without the other, and both missing. Every
    combination would be twice as many for each feature, and each takes a minute. A worked example
    counts as a feature. That of payments also comes with each feature that it makes use of.
    """
    names = features()
    without = dict.fromkeys(names, "no")
    for example in ("parcels", "payments"):
        yield {"worked_example": example, **dict.fromkeys(names, "yes")}
        yield {"worked_example": example, **without}
    for chosen in names:
        yield {"worked_example": "none", **without, chosen: "yes"}
    for used in ("outside_calls", "http_api"):
        yield {"worked_example": "payments", **without, used: "yes"}


@dataclass(frozen=True, slots=True)
class BakedProject:
    """A generated service in a folder of its own."""

    path: Path
    answers: Mapping[str, str]

    @property
    def package(self) -> str:
        """The name of the user's package."""
        return self.answers["package_name"]

    def read(self, name: str) -> str:
        """Return the text of one of its files."""
        return (self.path / name).read_text("utf-8")

    def files(self) -> dict[str, bytes]:
        """Return all its files by their paths, without what its tools have made."""
        made = {".git", ".hypothesis", ".stack", ".venv", "__pycache__", "build"}
        return {
            path.relative_to(self.path).as_posix(): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
            and not any(
                part in made or part.endswith(("_cache", ".egg-info"))
                for part in path.relative_to(self.path).parts
            )
        }

    def run(self, *command: str | Path, **environment: str) -> str:
        """Run a command in its folder and return what it said; fail if the command does."""
        done = subprocess.run(
            command,
            cwd=self.path,
            env={**clean_environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout}", pytrace=False)
        return done.stdout

    def make(self, *arguments: str) -> str:
        """Run make with the virtual environment of the template, which holds all it needs."""
        return self.run("make", f"VENV={sys.prefix}", *arguments)


@dataclass(frozen=True, slots=True)
class Template:
    """The template as a user gets it, without what has been made in the working folder."""

    path: Path
    home: Path

    @classmethod
    def copied_to(cls, folder: Path) -> "Template":
        """Copy what belongs to the template into `folder`, and keep cookiecutter at home there."""
        path = folder / "template"
        ignore = shutil.ignore_patterns("__pycache__", ".stack", ".venv", ".*_cache", "*.egg-info")
        for source in (ROOT / "hooks", RAW):
            shutil.copytree(source, path / source.name, ignore=ignore)
        for name in (
            "LICENSE",
            "cookiecutter.json",
            "engine_wheel.py",
            "imports.txt",
            "local_extensions.py",
        ):
            shutil.copy(ROOT / name, path)
        home = folder / "home"
        (home / "tmp").mkdir(parents=True)
        (home / "config.yaml").write_text(
            f"cookiecutters_dir: {home / 'cookiecutters'}\nreplay_dir: {home / 'replay'}\n", "utf-8"
        )
        return cls(path, home)

    def cookiecutter(
        self,
        output: Path,
        *arguments: str,
        typed: str | None = None,
        location: str | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run cookiecutter's own command on the template, answering its prompts with `typed`.

        `location` is another one of the template than its path.
        """
        output.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            [
                *(sys.executable, "-m", "cookiecutter", location or str(self.path)),
                *("--config-file", str(self.home / "config.yaml"), "--output-dir", str(output)),
                *arguments,
            ],
            cwd=output,
            env={**clean_environment(), "TMPDIR": str(self.home / "tmp"), **environment},
            input=typed,
            stdin=subprocess.DEVNULL if typed is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def bake(self, output: Path, **answers: str) -> BakedProject:
        """Generate a service into `output`, with the default answers except `answers`."""
        given = [f"{question}={answer}" for question, answer in answers.items()]
        done = self.cookiecutter(output, "--no-input", *given)
        assert done.returncode == 0, done.stdout
        complete = {**DEFAULTS, **answers}
        if "package_name" not in answers:
            complete["package_name"] = complete["service_name"].replace("-", "_")
        return BakedProject(output / complete["service_name"], complete)


def clean_environment() -> dict[str, str]:
    """Return the environment of a user's shell: without what make and pytest have put into ours."""
    ours = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "PYTHONPATH", "VENV"}
    ours |= {"PYTHONPYCACHEPREFIX", "RUFF_CACHE_DIR", "MYPY_CACHE_DIR", "PYTEST_CURRENT_TEST"}
    return {name: value for name, value in os.environ.items() if name not in ours}
