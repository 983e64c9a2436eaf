"""What must hold for the files of this repository, whatever they do."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pip._internal.models.index import PyPI

from local_extensions import UNUSABLE

from tests import language
from tests.baked import (
    DEFAULTS,
    ENGINES,
    EXAMPLES,
    RAW,
    ROOT,
    clean_environment,
    features,
    manifest,
    names_of_tests,
)

BASE = RAW / "requirements" / "base.txt"
DEV = RAW / "requirements" / "dev.txt"
ALL = ROOT / "requirements.txt"

QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))


def ours() -> Iterator[tuple[str, str]]:
    """Yield name and text of every file that is or will be committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name in listed.stdout.split("\0"):
        if (ROOT / name).is_file():
            # Pictures too: a path would be seen in them.
            yield name, (ROOT / name).read_text("utf-8", errors="replace")


def pins(requirements: Path) -> dict[str, tuple[str, ...]]:
    """Return the hashes of each pinned requirement."""
    pinned: dict[str, tuple[str, ...]] = {}
    for line in requirements.read_text("utf-8").replace("\\\n", "").splitlines():
        if not line.startswith("#"):
            requirement, *hashes = re.split(r"\s+--hash=", line.strip())
            pinned[requirement] = tuple(hashes)
    return pinned


@pytest.mark.parametrize("requirements", [BASE, DEV, ALL], ids=lambda path: path.name)
def test_every_requirement_is_pinned_with_hashes_and_without_an_address(requirements: Path) -> None:
    pinned = pins(requirements)

    assert len(pinned) > 30
    for requirement, hashes in pinned.items():
        assert re.match(r"[a-z0-9-]+==[\w.]+( ; .+)?$", requirement)
        assert hashes
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes)
    assert "://" not in requirements.read_text("utf-8")


def test_developers_and_contributors_have_exactly_what_the_service_has_and_more() -> None:
    base, dev, everything = pins(BASE), pins(DEV), pins(ALL)

    assert base.items() < dev.items() < everything.items()


def test_no_file_names_a_registry_or_a_folder_of_this_machine() -> None:
    registries = "|".join(map(re.escape, (PyPI.netloc, PyPI.file_storage_domain, "/maven" + "2")))
    # As whole paths: the checkout may lie in a folder whose name is in many words.
    folders = "|".join(map(re.escape, (str(ROOT), sys.prefix, str(Path.home()))))
    forbidden = re.compile(rf"{registries}|(?<![\w.~>}})/-])(?:{folders})/\w")

    found = {(name, each[0]) for name, text in ours() for each in forbidden.finditer(text)}

    assert found == set()


def test_every_question_has_a_readable_prompt() -> None:
    asked = {question for question in QUESTIONS if not question.startswith("_")}

    assert asked == set(QUESTIONS["__prompts__"]) == set(DEFAULTS)
    for prompt in QUESTIONS["__prompts__"].values():
        sentence, *_ = prompt.splitlines()
        assert sentence[0].isupper()
        assert len(sentence.split()) >= 4


def test_every_feature_is_a_question_with_yes_and_no() -> None:
    for feature in features():
        # Text: Cookiecutter ends with a traceback when a choice that is not offered is given.
        assert QUESTIONS[feature] in ("yes", "no")
        assert QUESTIONS[feature] == DEFAULTS[feature]
        _, yes, no, typed = QUESTIONS["__prompts__"][feature].splitlines()
        assert re.match(r" +yes: \w", yes)
        assert re.match(r" +no: \w", no)
        assert typed.split() == ["Type", "yes", "or", "no"]


def test_the_worked_example_is_a_question_with_the_names_of_the_examples() -> None:
    _, *examples, typed = QUESTIONS["__prompts__"]["worked_example"].splitlines()

    assert QUESTIONS["worked_example"] == DEFAULTS["worked_example"] == EXAMPLES[0]
    assert [one.strip().partition(": ")[0] for one in examples] == [*EXAMPLES]
    assert typed.split() == ["Type", "parcels,", "payments", "or", "none"]


def test_the_engine_is_a_question_with_the_names_of_its_kinds() -> None:
    _, *kinds, typed = QUESTIONS["__prompts__"]["engine"].splitlines()

    assert QUESTIONS["engine"] == DEFAULTS["engine"] == ENGINES[0]
    assert [one.strip().partition(": ")[0] for one in kinds] == [*ENGINES]
    assert typed.split() == ["Type", "source", "or", "package"]


def test_what_the_manifest_takes_away_exists() -> None:
    for paths in manifest().values():
        asked = [path.removeprefix("shared: ") for path in paths if "requirements: " not in path]
        assert [path for path in asked if not (RAW / path).exists()] == []


def test_the_folders_that_are_copied_hold_no_template() -> None:
    folders = [pattern for pattern in QUESTIONS["_copy_without_render"] if "*" not in pattern]

    assert "src/onceward" in folders
    for folder in folders:
        for path in (RAW / folder).rglob("*.*"):
            if path.suffix in {".py", ".sql", ".mako", ".ini"}:
                text = path.read_text("utf-8")
                assert not re.search(r"<<\s*cookiecutter|# <[%#]", text), path


def test_the_changelog_begins_with_the_version_of_the_template() -> None:
    [newest, *_] = re.findall(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )

    assert newest == QUESTIONS["_template_version"]


def test_the_raw_service_is_configured_for_its_tools_before_it_is_baked() -> None:
    raw = tomllib.loads((RAW / "pyproject.toml").read_text("utf-8"))

    assert {"ruff", "mypy", "pytest", "importlinter"} <= set(raw["tool"])


def test_continuous_integration_calls_the_tests_that_contributors_call() -> None:
    script = ROOT / ".ci" / "run"

    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    assert script.read_text("utf-8").rstrip().endswith("test")


@pytest.mark.parametrize("folder", [ROOT, RAW], ids=["template", "service"])
def test_every_command_of_make_says_what_it_does(folder: Path) -> None:
    text = (folder / "Makefile").read_text("utf-8")
    commands = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    parts = {"check-raw", "test-template", "test-engine-full", "test-template-full"}
    parts |= {"announce-test", "test-engine"} if folder == ROOT else set()

    assert commands - parts == set(re.findall(r"^([a-z-]+):.*## \w", text, re.MULTILINE))


@pytest.mark.parametrize("folder", [ROOT, RAW], ids=["template", "service"])
@pytest.mark.parametrize("name", ["a:b", "50 %", "$HOME", "\\t", '"x"', "`x`", "müller", "a b"])
def test_make_runs_in_any_folder_whose_path_tools_take_literally(
    folder: Path, name: str, tmp_path: Path
) -> None:
    where = tmp_path / name
    where.mkdir()
    shutil.copy(folder / "Makefile", where)

    done = subprocess.run(
        ["make", "help"],
        cwd=where,
        env=clean_environment(),
        capture_output=True,
        encoding="utf-8",
    )

    if set(name) & set(UNUSABLE):
        assert done.returncode != 0
        assert f"rename or move {where}" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "  make setup" in done.stdout


@pytest.mark.parametrize("folder", [ROOT, RAW], ids=["template", "service"])
@pytest.mark.parametrize("code", [0, 3])
def test_make_shows_a_dot_for_each_package_and_ends_as_pip_does(
    folder: Path, code: int, tmp_path: Path
) -> None:
    shutil.copy(folder / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    said = "Collecting a\\n  Downloading a\\nCollecting b\\nInstalling collected packages\\n"
    python.write_text(f"#!/bin/sh\nprintf '{said}'\nexit {code}\n", "utf-8")
    python.chmod(0o755)

    done = subprocess.run(
        ["make", "setup"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )

    assert re.search(r"^Installing the packages .*: \.\.\.$", done.stdout, re.MULTILINE)
    assert (done.returncode == 0) == (code == 0), done.stderr
    assert bool([*tmp_path.glob(".venv/.[hi]*")]) == (code == 0)


@pytest.mark.parametrize("folder", [ROOT, RAW], ids=["template", "service"])
def test_make_stops_one_server_or_all(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "Makefile", tmp_path)

    def stops(*arguments: str, **environment: str) -> list[str]:
        said = subprocess.check_output(
            ["make", "--dry-run", "down", *arguments],
            cwd=tmp_path,
            env={**clean_environment(), **environment},
            stderr=subprocess.DEVNULL,
            text=True,
        )
        found = re.findall(r"(?:stack\.py\S* |\.run --)(?:down|stop)\b.*", said)
        return [each.partition(" ")[2].strip() for each in found]

    assert stops("SERVER=kafka") == ["down kafka"]
    for said in (stops(), stops(SERVER="kafka")):  # a variable of a shell may be any server's
        assert said[0] == "down"


@pytest.mark.parametrize("folder", [ROOT, RAW], ids=["template", "service"])
def test_uv_trusts_the_systems_certificate_authorities(folder: Path) -> None:
    makefile = (folder / "Makefile").read_text("utf-8")
    [name] = re.findall(r"^export (UV_\w+) \?= true$", makefile, re.MULTILINE)
    told = subprocess.check_output([f"{sys.prefix}/bin/uv", "help", "pip", "compile"], text=True)

    assert re.search(rf"--system-certs [^][]*\[env: {name}=\]", " ".join(told.split()))


def test_every_test_that_a_page_names_exists() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *RAW.glob("docs/*.md")]
    files = [*ROOT.glob("tests/**/test_*.py"), *RAW.glob("tests/**/test_*.py")]
    known = names_of_tests({str(file): file.read_text("utf-8") for file in files})
    known.add("test_issue_receipt")  # written by the reader of the tutorial
    for page in pages:
        named = re.findall(r"`(?:[\w/]+/)?(test_[\w*]+)(?:\.py)?`", page.read_text("utf-8"))
        for name in named:
            assert fnmatch.filter(known, name), f"{page.name}: {name}"


def test_a_forbidden_phrase_is_found_with_its_line() -> None:
    forbidden = " ".join(("is", "no"))
    text = f"There {forbidden} error.\n\n`{forbidden}`, and\nthis is\nno error.\n"
    assert [line for line, _ in language.faults(text, is_page=True)] == [4]
    names = f"def test_a_path_that_{forbidden.replace(' ', '_')}_link_is_found() -> None:\n"
    assert [line for line, _ in language.faults(names, is_page=False)] == [1]
    assert list(language.faults("it is not one, and is no longer\n", is_page=True)) == []
