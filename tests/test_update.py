"""`make update`: another version of the template, merged into a service that its owner edited."""

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import pytest

import local_extensions

from tests.baked import (
    DEFAULTS,
    ENGINES,
    RAW,
    ROOT,
    BakedProject,
    Template,
    clean_environment,
)
from tests.interception import authority, intercepting
from tests.release import released

AGES = range(30, 301, 30)
"""How many commits of main before the present one a service was baked."""

UV = f"{sys.prefix}/bin/uv"
UPDATE = RAW / "dev" / "update.py"

# A branch of conflicts is read here as the base has it, too.
ADA = {"user.name": "Ada", "user.email": "ada@example.org", "merge.conflictStyle": "diff3"}

PIN = f"humanize==4.12.0 --hash=sha256:{'0' * 64}\n"

EDITS = {
    "src/{package}/handlers.py": (
        (r"(?m)^LATE = .*$", "LATE = 4711"),
        (
            r"\Z",
            '\n\ndef shelf(place: str) -> str:\n    """Return its shelf."""\n    return place\n',
        ),
    ),
    "deploy/compose.service.yaml": ((r"(PIPELINE_TRACE_SAMPLE_RATIO:) .*", r'\1 "0.4711"'),),
    "README.md": (
        (r"(?m)^An event-driven service .*$", "Parcels of shelf 4711."),
        (r"\Z", "\n## On call\n\nCall 4711.\n"),
    ),
    "Makefile": ((r"\Z", "\n.PHONY: ship\nship: ## ship it\n\t@echo shipped 4711\n"),),
    "requirements/base.in": ((r"\Z", "humanize>=4.12,<5\n"),),
    "requirements/base.txt": ((r"(?m)^(?=idna==)", PIN),),
}
"""What an owner changes: a pattern of each edit, and what takes its place."""

KEPT = {
    "src/{package}/handlers.py": ("LATE = 4711", "def shelf("),
    "deploy/compose.service.yaml": ('"0.4711"',),
    "README.md": ("Parcels of shelf 4711.", "Call 4711."),
    "Makefile": ("shipped 4711",),
    "requirements/base.in": ("humanize>=4.12,<5",),
    "requirements/base.txt": ("humanize==4.12.0",),
}


def git(folder: Path, *arguments: str) -> str:
    """Run git, as Ada, and return what it wrote."""
    who = [word for name in ("user.name", "user.email") for word in ("-c", f"{name}={ADA[name]}")]
    done = subprocess.run(
        ["git", "-C", folder, *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def commit(folder: Path, message: str) -> str:
    """Commit all that is in a folder, and return the commit."""
    git(folder, "add", "--all", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(folder, "rev-parse", "HEAD").strip()


def edit(path: Path, *edits: tuple[str, str]) -> None:
    """Replace each pattern, which must be there."""
    text = path.read_text("utf-8")
    for pattern, replacement in edits:
        text, count = re.subn(pattern, replacement, text, count=1)
        assert count == 1, (path, pattern)
    path.write_text(text, "utf-8")


@dataclass(frozen=True)
class Outcome:
    """How an update ended."""

    code: int
    said: str


def make_update(project: BakedProject, *arguments: str) -> Outcome:
    """Run `make update` with the virtual environment of the template."""
    return run(project.path, "make", f"VENV={sys.prefix}", "update", *arguments)


def update(folder: Path, *arguments: str, **environment: str) -> Outcome:
    """Run what `make update` runs, in the environment of the template, which has cookiecutter."""
    return run(folder, sys.executable, str(UPDATE), *arguments, **environment)


def run(folder: Path, *command: str, **environment: str) -> Outcome:
    """Run a command in a folder, whatever its exit code is."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Outcome(done.returncode, done.stdout)


def owned(project: BakedProject) -> BakedProject:
    """Make a baked service Ada's: her name, her edits, her commit."""
    if not (project.path / ".git").exists():  # baked before a bake made a repository
        project.run("git", "init", "--quiet", "--initial-branch=main")
        commit(project.path, "As it was baked")
    for name, value in ADA.items():
        project.run("git", "config", name, value)
    for path, edits in EDITS.items():
        edit(project.path / path.format(package=project.package), *edits)
    commit(project.path, "Ada's edits")
    return project


def without_unmarked(project: BakedProject) -> BakedProject:
    """Delete the branch of a service that was baked when commits of bakes had no mark."""
    has_branch = "template" in project.run("git", "branch").split()
    if has_branch and "Template-Tree: " not in project.run("git", "log", "--format=%B", "template"):
        project.run("git", "branch", "--quiet", "-D", "template")
    return project


def conflicts(project: BakedProject) -> set[str]:
    """Return the files with conflicts."""
    return set(project.run("git", "diff", "--name-only", "--diff-filter=U").split())


def assert_merged(project: BakedProject, fresh: BakedProject) -> None:
    """Check every file of a service after an update, against a bake of the wanted version."""
    edited = {path.format(package=fresh.package) for path in EDITS}
    conflicting = conflicts(project)
    assert conflicting <= edited
    merged, baked = project.files(), fresh.files()
    assert {path for path in merged.keys() | baked if merged.get(path) != baked.get(path)} == edited
    for path, texts in KEPT.items():
        for text in texts:
            assert text in project.read(path.format(package=fresh.package)), (path, text)
    for path in conflicting:
        hunk = r"(?ms)^<{7}[^\n]*\n(.*?)^\|{7}[^\n]*\n(.*?)^={7}\n(.*?)^>{7}"
        found = re.findall(hunk, project.read(path))
        assert found, path
        assert all(before not in (ours, theirs) for ours, before, theirs in found), path
    aside = [f"--extend-exclude={path}" for path in conflicting]
    project.run(sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", *aside)
    if not conflicting:
        assert project.run("git", "status", "--porcelain") == ""
        assert "template" in project.run("git", "branch", "--merged", "HEAD")


@dataclass(frozen=True)
class History:
    """A template in git, with the versions that a test names."""

    template: Template
    old: str
    new: str

    def bake(self, output: Path, version: str, **answers: str) -> BakedProject:
        """Bake a version."""
        git(self.template.path, "checkout", "--quiet", version)
        try:
            return self.template.bake(output, **answers)
        finally:
            git(self.template.path, "checkout", "--quiet", "main")

    def bake_aged(self, output: Path, commits: int) -> tuple[str, BakedProject]:
        """Bake the newest version at least so many commits old; some can't be generated."""
        listed = git(ROOT, "rev-list", "--first-parent", f"--skip={commits}", "HEAD")
        for version in listed.split():
            with suppress(AssertionError):
                return version, self.bake(output, version)
        raise AssertionError("no version can be generated")


def questions(path: Path, *more: str) -> None:
    """Let a template have further questions, whose answers it records."""
    for name in ("cookiecutter.json", f"{RAW.name}/.cookiecutter.json"):
        for question in more:
            answer = "blue" if name == "cookiecutter.json" else f"<<cookiecutter.{question}>>"
            edit(
                path / name, (r'(?m)^( *)("engine_tests": )', rf'\1"{question}": "{answer}",\n\1\2')
            )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """This template with a question more, behind a version that is older in and around the engine.

    The older one is first in git, a release has its tag, and the newest commit is no release.
    """
    template = Template.copied_to(tmp_path_factory.mktemp("history"))
    path, raw = template.path, template.path / RAW.name
    shutil.copy(ROOT / "CHANGELOG.md", path)
    shutil.copy(ROOT / ".gitignore", path)
    git(path.parent, "init", "--quiet", "--initial-branch=main", str(path))
    present = commit(path, "Present")
    git(path, "checkout", "--quiet", "--orphan", "other")
    edit(path / "CHANGELOG.md", (r"(?m)^- \*\*Handlers\.\*\*.*\n", ""))
    edit(raw / "README.md", (r"(?m)^## Tests$", "## Testing"))
    edit(path / "imports.txt", (r"(?m)^redis\n", ""))
    edit(raw / "src/onceward/migrations/first_inbox.py", (r"\A", "# As it was.\n"))
    edit(raw / "src/onceward/settings.py", (r"\A", "# As it was.\n"))
    (raw / "src/onceward/errors.py").rename(raw / "src/onceward/mistakes.py")
    questions(path, "bygone")
    old = commit(path, "Older")
    git(path, "checkout", "--quiet", present, ".")
    (raw / "src/onceward/mistakes.py").unlink()
    questions(path, "shelf")
    new = commit(path, "Newer")
    git(path, "tag", "v1.9.0")
    git(path, "tag", "v1.10.0")
    git(path, "tag", "v1.10.0-rc1", old)
    git(path, "tag", "v1.9.0", "--force", old)
    git(path, "branch", "--force", "main")
    git(path, "checkout", "--quiet", "main")
    return History(template, old, new)


@pytest.mark.slow
def test_a_bake_ends_with_a_first_commit_on_template_and_main(
    history: History, output: Path, tmp_path: Path
) -> None:
    (tmp_path / "ignored").write_text("docs/\n*.md\n", "utf-8")
    of_user = {
        "GIT_CONFIG_COUNT": "3",
        "GIT_CONFIG_KEY_0": "commit.gpgSign",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_CONFIG_KEY_1": "gpg.program",
        "GIT_CONFIG_VALUE_1": "false",
        "GIT_CONFIG_KEY_2": "core.excludesFile",
        "GIT_CONFIG_VALUE_2": str(tmp_path / "ignored"),
    }
    of_hook = {"GIT_DIR": str(tmp_path / "other.git"), "GIT_INDEX_FILE": "other", "GIT_PREFIX": "/"}

    done = history.template.cookiecutter(output, "--no-input", **of_user, **of_hook)

    project = BakedProject(output / "parcel-tracker", DEFAULTS)
    assert done.stdout.endswith(
        "parcel-tracker was generated. Its first commit is on the branches main, for you, and "
        "template, for `make update`.\nNext: cd parcel-tracker && make run\n"
    )
    assert project.run("git", "branch", "--format=%(HEAD)%(refname:short)").split() == [
        "*main",
        "template",
    ]
    (first,) = project.run("git", "rev-list", "main").split()
    assert project.run("git", "rev-parse", "template").strip() == first
    tree, message = project.run("git", "log", "-1", "--format=%T %B").split(" ", 1)
    assert message.strip().endswith(f"\n\nTemplate-Tree: {tree}")
    assert project.run("git", "status", "--porcelain") == ""
    assert set(project.run("git", "ls-files").splitlines()) == set(project.files())
    record = json.loads(project.read(".cookiecutter.json"))
    assert list(record) == ["template", "commit", "template_version", "cookiecutter"]
    assert record["template"] == str(history.template.path)
    assert record["commit"] == history.new


NOBODY = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "user.useConfigOnly",
    "GIT_CONFIG_VALUE_0": "true",
}
"""Variables for git that leave it without a user, beside an empty HOME."""


@pytest.mark.slow
def test_a_bake_without_an_identity_of_git_has_a_neutral_one(
    template: Template, output: Path, tmp_path: Path
) -> None:
    empty = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}

    done = template.cookiecutter(output, "--no-input", **empty, **NOBODY)

    assert "Its first commit is on" in done.stdout
    author = git(output / "parcel-tracker", "log", "--format=%an <%ae>")
    assert author == "cookiecutter <cookiecutter@localhost>\n"


@pytest.mark.slow
def test_a_bake_goes_without_a_repository_where_git_is_missing_or_fails(
    template: Template, output: Path, tmp_path: Path
) -> None:
    missing = template.cookiecutter(output / "1", "--no-input", PATH=str(tmp_path))
    failing = template.cookiecutter(
        output / "2",
        "--no-input",
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0="user.useConfigOnly",
        GIT_CONFIG_VALUE_0="perhaps",
    )

    assert (missing.returncode, failing.returncode) == (0, 0)
    assert "git is not installed, so it has no repository" in missing.stdout
    assert re.search(r"It has no repository: .*perhaps", failing.stdout)
    for done, folder in ((missing, "1"), (failing, "2")):
        assert done.stdout.endswith("\nNext: cd parcel-tracker && make run\n")
        assert not (output / folder / "parcel-tracker" / ".git").exists()
        assert (output / folder / "parcel-tracker" / ".engine.sha256").exists()


@pytest.mark.slow
def test_a_bake_inside_a_repository_leaves_the_commit_to_its_owner(
    template: Template, output: Path
) -> None:
    git(output.parent, "init", "--quiet", str(output))

    done = template.cookiecutter(output / "apps", "--no-input")

    assert f"It is in the git repository {output.resolve()}: commit it there." in done.stdout
    assert not (output / "apps" / "parcel-tracker" / ".git").exists()
    assert git(output, "branch", "--all") == ""


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["/apps/", "*", "apps/parcel-tracker/**"])
@pytest.mark.parametrize("place", [".gitignore", ".git/info/exclude"])
def test_a_bake_in_an_ignored_folder_has_a_repository_of_its_own(
    template: Template, output: Path, place: str, pattern: str
) -> None:
    git(output.parent, "init", "--quiet", str(output))
    (output / place).write_text(f"{pattern}\n", "utf-8")

    done = template.cookiecutter(output / "apps", "--no-input")

    assert "Its first commit is on the branches main, for you, and template" in done.stdout
    project = BakedProject(output / "apps" / "parcel-tracker", DEFAULTS)
    assert project.run("git", "rev-parse", "--show-toplevel").strip() == str(project.path.resolve())
    assert set(project.run("git", "ls-files").splitlines()) == set(project.files())


@pytest.mark.slow
def test_a_bake_names_files_that_the_repository_around_it_ignores(
    template: Template, output: Path
) -> None:
    git(output.parent, "init", "--quiet", str(output))
    (output / ".gitignore").write_text("*.txt\n", "utf-8")

    done = template.cookiecutter(output, "--no-input")

    said = "which ignores requirements/base.txt, requirements/dev.txt: commit it there"
    assert said in done.stdout
    assert "git add --force parcel-tracker" in done.stdout


@pytest.mark.full
@pytest.mark.slow
def test_the_cloned_url_is_recorded_and_changed_templates_have_no_commit(
    history: History, output: Path
) -> None:
    path = history.template.path
    cloned = history.template.cookiecutter(
        output / "1", "--no-input", location=f"git+file://{path}"
    )
    assert cloned.returncode == 0, cloned.stdout
    leftover = path / RAW.name / "leftover.txt"
    leftover.touch()
    changed = history.template.cookiecutter(
        output / "2", "--no-input", location=os.path.relpath(path, output / "2")
    )
    leftover.unlink()

    assert changed.returncode == 0, changed.stdout
    first, second = (
        json.loads((output / folder / "parcel-tracker/.cookiecutter.json").read_text("utf-8"))
        for folder in ("1", "2")
    )
    assert (first["template"], first["commit"]) == (f"file://{path}", history.new)
    assert (second["template"], second["commit"]) == (str(path), None)


def test_a_password_in_the_location_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(UPDATE.parent))
    updater = runpy.run_path(str(UPDATE))
    for given, kept in (
        ("https://ada:secret@example.org/t.git", "https://example.org/t.git"),
        ("https://:secret@example.org/t.git", "https://example.org/t.git"),
        ("https://token@example.org/t.git", "https://example.org/t.git"),
        ("git+HTTPS://ada:s@cret@example.org/t.git", "git+HTTPS://example.org/t.git"),
        ("http://ada:se/cret@example.org/t.git", "http://example.org/t.git"),
        ("https://example.org:8443/t@1/t.git", "https://example.org:8443/t@1/t.git"),
        ("https://[::1]:8443/t@1/t.git", "https://[::1]:8443/t@1/t.git"),
        ("ssh://git:s@cret@example.org/t.git", "ssh://example.org/t.git"),
        ("ssh://git@example.org/t.git", "ssh://git@example.org/t.git"),
        ("git@example.org:ada/t.git", "git@example.org:ada/t.git"),
        ("gh:ada/t", "gh:ada/t"),
    ):
        assert local_extensions.without_password(given) == kept
        assert updater["without_password"](given) == kept


@pytest.mark.full
def test_the_oldest_cookiecutter_bakes_as_ours_does(history: History, output: Path) -> None:
    output.mkdir()
    bake = ("cookiecutter", "--no-input", "--output-dir", str(output), str(history.template.path))

    outcome = run(output, UV, "tool", "run", "--from", "cookiecutter==2.6.0", *bake)

    assert outcome.code == 0, outcome.said
    fresh = history.bake(output / "fresh", history.new)
    assert BakedProject(output / "parcel-tracker", DEFAULTS).files() == fresh.files()


@pytest.mark.slow
def test_an_update_brings_the_newer_version_and_keeps_what_the_owner_edited(
    history: History, output: Path
) -> None:
    fresh = history.bake(output / "fresh", history.new)
    project = owned(history.bake(output, history.old))
    assert json.loads(project.read(".cookiecutter.json"))["commit"] == history.old

    outcome = make_update(project)

    assert outcome.code == 0, outcome.said
    assert_merged(project, fresh)
    assert "- **Handlers.**" in outcome.said
    assert "- **Consuming.**" not in outcome.said
    assert "New question shelf: answered 'blue'" in outcome.said
    assert "The question bygone was removed" in outcome.said
    assert "`service migrate` before" in outcome.said
    assert "Requirements" not in outcome.said

    again = make_update(project)

    assert again.code == 0, again.said
    assert "Nothing to merge" in again.said
    assert "`service migrate`" not in again.said


@pytest.mark.full
def test_other_answers_are_merged_at_the_recorded_version(history: History, output: Path) -> None:
    answers = {"operations_page": "no", "description": "It's Ada's, at 5"}
    fresh = history.bake(output / "fresh", history.old, **answers)
    project = owned(history.bake(output, history.old))

    outcome = make_update(project, "ANSWERS=operations_page=no description=\"It's Ada's, at 5\"")

    assert outcome.code == 2  # the description is a line of the README, which Ada has edited
    assert conflicts(project) == {"README.md"}
    assert_merged(project, fresh)
    project.run("git", "merge", "--abort")
    assert (project.path / "src" / "onceward" / "page").exists()

    edit(project.path / "README.md", (r"Parcels of shelf 4711\.", f"{DEFAULTS['description']}."))
    commit(project.path, "As the template has it")
    outcome = make_update(project, "ANSWERS=operations_page=no description=\"It's Ada's, at 5\"")

    assert outcome.code == 0, outcome.said
    assert "It's Ada's, at 5." in project.read("README.md")
    assert project.run("git", "rev-list", "--count", "template").strip() == "2"
    assert not (project.path / "src" / "onceward" / "page").exists()


@pytest.mark.full
def test_an_update_brings_another_version_of_an_engine_that_is_a_package(
    history: History, output: Path
) -> None:
    path = history.template.path
    git(path, "checkout", "--quiet", "-b", "later", history.new)
    edit(path / "cookiecutter.json", (r'("_template_version": )"[^"]+"', r'\1"1.11.0"'))
    newer = commit(path, "Later")
    git(path, "checkout", "--quiet", "main")
    fresh = history.bake(output / "fresh", newer, engine="package")
    project = owned(history.bake(output, history.old, engine="package"))
    pin = r"(?m)^onceward==(\S+) \\\n    --hash=sha256:(\w+)$"
    [before] = re.findall(pin, project.read("requirements/base.txt"))

    outcome = update(project.path, f"--to={newer}")

    assert outcome.code == (1 if conflicts(project) else 0), outcome.said
    assert "`service migrate`" in outcome.said, "the migrations are in the distribution"
    assert_merged(project, fresh)
    assert "==1.11.0 # the engine\n" in project.read("requirements/base.in")
    for file in ("base.txt", "dev.txt"):
        [after] = re.findall(pin, project.read(f"requirements/{file}"))
        assert after[0] == "1.11.0"
        assert after[1] != before[1]


@pytest.mark.full
def test_an_update_replaces_engine_source_by_a_package_and_back(
    history: History, output: Path
) -> None:
    fresh = {kind: history.bake(output / kind, history.new, engine=kind) for kind in ENGINES}
    project = history.bake(output, history.new)
    for name, value in ADA.items():
        project.run("git", "config", name, value)

    for kind in ("package", "source", "package"):
        outcome = update(project.path, f"engine={kind}")
        assert outcome.code == 0, outcome.said
        assert project.files() == fresh[kind].files()
        assert project.run("git", "status", "--porcelain") == ""

    refused = update(project.path, "engine_tests=yes")
    assert refused.code == 1
    assert (
        "engine_tests must be no if engine is package, whose source is elsewhere." in refused.said
    )
    assert project.files() == fresh["package"].files()


@pytest.mark.full
def test_a_service_keeps_a_name_that_a_newer_version_refuses(
    history: History, output: Path
) -> None:
    project = owned(history.bake(output, history.old, package_name="redis"))

    outcome = update(project.path)

    assert outcome.code == 0, outcome.said
    assert outcome.said.count("warning: package_name must not be the name of a module") == 1
    assert json.loads(project.read(".cookiecutter.json"))["commit"] == history.new
    assert "package_name must not be" in update(project.path, "package_name=aiokafka").said


@pytest.mark.full
def test_an_update_names_the_settings_that_its_answers_bring(
    history: History, output: Path
) -> None:
    project = history.bake(output, history.new, operations_page="no")
    for name, value in ADA.items():
        project.run("git", "config", name, value)

    outcome = update(project.path, "personal_data=yes", "operations_page=yes")

    assert outcome.code == 0, outcome.said
    both = "PIPELINE_PAGE_TOKEN, PIPELINE_PERSONAL_KEYS"
    assert f"- New in deploy/, set where the service runs: {both}." in outcome.said


@pytest.mark.full
def test_the_worked_example_is_taken_out_as_the_read_me_says(
    history: History, output: Path
) -> None:
    fresh = history.bake(output / "fresh", history.old, worked_example="none")
    project = history.bake(output, history.old)
    for name, value in ADA.items():
        project.run("git", "config", name, value)
    [answers] = re.findall(r'`make update ANSWERS="(\S+)"` takes it out', project.read("README.md"))

    outcome = make_update(project, f"ANSWERS={answers}")

    assert outcome.code == 0, outcome.said
    assert project.files() == fresh.files()


@pytest.mark.full
def test_an_edited_line_of_the_engine_is_merged_like_any_other(
    history: History, output: Path
) -> None:
    project = owned(history.bake(output, history.old))
    edit(project.path / "src/onceward/settings.py", (r"\Z", "# Ada's.\n"))
    edit(project.path / "src/onceward/mistakes.py", (r"\Z", "# Ada's.\n"))
    commit(project.path, "The engine")

    outcome = update(project.path)

    assert outcome.code == 0, outcome.said
    assert project.read("src/onceward/settings.py").endswith("# Ada's.\n")
    assert "As it was" not in project.read("src/onceward/settings.py")
    assert project.read("src/onceward/errors.py").endswith("# Ada's.\n")
    warned = project.run(sys.executable, "dev/engine.py")
    assert re.findall(r"(?m)^  \w+ +(\S+)$", warned) == [
        "src/onceward/errors.py",
        "src/onceward/settings.py",
    ]


@pytest.mark.full
def test_an_engine_that_is_unedited_never_conflicts(history: History, output: Path) -> None:
    """Even where the version that it came from is given wrong, as for one that records none."""
    path, wrong = history.template.path, f"{RAW.name}/src/onceward/settings.py"
    git(path, "checkout", "--quiet", "--detach", history.old)
    edit(path / wrong, (r"\A", "# Never.\n"))
    never = commit(path, "Not an ancestor of the service")
    git(path, "checkout", "--quiet", "main")
    fresh = history.bake(output / "fresh", history.new)
    project = owned(history.bake(output, history.old))

    outcome = update(project.path, f"--from={never}", f"--to={history.new}")

    assert outcome.code == 0, outcome.said
    assert_merged(project, fresh)


@pytest.mark.full
@pytest.mark.parametrize("lost", ["branch", "history"])
def test_a_service_without_the_branch_gets_it_from_the_recorded_version(
    history: History, output: Path, lost: str
) -> None:
    fresh = history.bake(output / "fresh", history.new)
    project = history.bake(output, history.old)
    if lost == "history":
        shutil.rmtree(project.path / ".git")
    else:
        project.run("git", "branch", "--delete", "template")
    owned(project)

    outcome = update(project.path)

    assert outcome.code == 0, outcome.said
    assert_merged(project, fresh)
    base = json.loads(project.run("git", "show", "template~1:.cookiecutter.json"))
    assert base["commit"] == history.old


@pytest.mark.full
def test_a_clone_finds_its_origins_branch_and_knows_squashed_updates(
    history: History, output: Path
) -> None:
    project = history.bake(output, history.old)
    git(output, "clone", "--quiet", str(project.path), "clone")
    clone = owned(BakedProject(output / "clone", project.answers))
    clone.run("git", "checkout", "--quiet", "-b", "squashed")
    assert update(clone.path).code == 0
    clone.run("git", "checkout", "--quiet", "main")
    clone.run("git", "merge", "--quiet", "--squash", "squashed")
    commit(clone.path, "Squashed")
    clone.run("git", "branch", "--quiet", "-D", "squashed")

    outcome = update(clone.path, "operations_page=no")

    assert outcome.code == 0, outcome.said
    fresh = history.bake(output / "fresh", history.new, operations_page="no")
    assert_merged(clone, fresh)


@pytest.mark.full
def test_services_of_one_repository_have_a_branch_each(history: History, output: Path) -> None:
    git(output.parent, "init", "--quiet", "--initial-branch=main", str(output))
    fresh = history.bake(output.parent / "fresh", history.new)
    project = history.bake(output / "apps", history.old)
    assert not (project.path / ".git").exists()
    for name, value in ADA.items():
        git(output, "config", name, value)
    (output / "README.md").write_text("Ada's\n", "utf-8")
    commit(output, "All")
    for path, edits in EDITS.items():
        edit(project.path / path.format(package=project.package), *edits)
    commit(output, "Ada's edits")
    elsewhere = output.parent / "unreleased"
    git(output.parent, "clone", "--quiet", "--no-tags", str(history.template.path), str(elsewhere))

    outcome = update(project.path, "--template=../../../unreleased")

    assert outcome.code == 0, outcome.said
    record = json.loads(project.read(".cookiecutter.json"))
    assert (record["template"], record["commit"]) == (str(elsewhere), history.new)
    assert git(output, "branch", "--list", "template*").split() == ["template-apps-parcel-tracker"]
    edited = {path.format(package=project.package) for path in EDITS} | {".cookiecutter.json"}
    merged, baked = project.files(), fresh.files()
    assert {path for path in merged.keys() | baked if merged.get(path) != baked.get(path)} == edited
    assert git(output, "status", "--porcelain") == ""
    assert (output / "README.md").exists()


@pytest.mark.slow
def test_what_keeps_an_update_from_beginning_is_said_and_nothing_is_changed(
    history: History, output: Path, tmp_path: Path
) -> None:
    project = owned(history.bake(output, history.old))
    before = project.run("git", "for-each-ref")
    record = project.read(".cookiecutter.json")

    def refusal(*arguments: str, **environment: str) -> str:
        outcome = update(project.path, *arguments, **environment)
        assert outcome.code == 1
        assert project.run("git", "for-each-ref") == before
        assert not any((project.path / "build").glob("*"))
        return outcome.said

    assert "has no version 7.7" in refusal("--to=7.7")
    assert "has no question colour" in refusal("colour=red")
    assert "operations_page must be yes or no" in refusal("operations_page=maybe")
    assert "would be run as a template" in refusal("description=<<1>>")
    assert "The template can't be cloned" in refusal("--template=nowhere")
    assert "git is not installed" in refusal(PATH=str(tmp_path))
    project.run("git", "config", "--unset", "user.email")
    empty = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    assert "set user.name and user.email" in refusal(**empty, **NOBODY)
    project.run("git", "config", "user.email", ADA["user.email"])
    edit(project.path / "README.md", (r"\Z", "More.\n"))
    assert "uncommitted changes" in refusal()
    project.run("git", "checkout", "--quiet", "README.md")
    project.run("git", "checkout", "--quiet", "template")
    assert "check out your own branch" in refusal()
    project.run("git", "checkout", "--quiet", "main")

    edit(project.path / ".cookiecutter.json", (r'"commit": ".*"', '"commit": null'))
    commit(project.path, "Unknown")
    before = project.run("git", "for-each-ref")
    assert "FROM=<tag or commit>" in refusal()
    assert "TO=<version>" in refusal("operations_page=no")
    (project.path / ".cookiecutter.json").write_text(record, "utf-8")
    project.run("git", "checkout", "--quiet", "--orphan", "mine")
    project.run("git", "commit", "--quiet", "--message", "Mine")
    project.run("git", "branch", "--quiet", "--force", "template")
    project.run("git", "rm", "--quiet", "--cached", ".cookiecutter.json")
    before = project.run("git", "for-each-ref")
    assert "uncommitted" in refusal()
    shutil.rmtree(project.path / ".git")
    outcome = update(project.path)
    assert (outcome.code, "git repository first" in outcome.said) == (1, True)


@dataclass(frozen=True)
class Small:
    """A service of a template of few files, with the versions v0.1.0 to v0.3.0, at v0.1.0."""

    template: Path
    path: Path

    def update(self, *arguments: str, **environment: str) -> Outcome:
        """Run `update.py` on it."""
        return update(self.path, *arguments, **environment)

    def git(self, *arguments: str) -> str:
        """Run git in its folder."""
        return git(self.path, *arguments).strip()

    def state(self) -> tuple[str, ...]:
        """Return what an update that is refused must not change."""
        refs = self.git("for-each-ref"), self.git("rev-parse", "HEAD")
        return (*refs, self.git("status", "--porcelain", "--ignored"))

    def refusal(self, *arguments: str, **environment: str) -> str:
        """Return what a refused update says, and check that nothing was changed."""
        before = self.state()
        outcome = self.update(*arguments, **environment)
        assert outcome.code == 1, outcome.said
        assert self.state() == before
        return outcome.said

    def read(self, name: str) -> str:
        """Return the text of one of its files."""
        return (self.path / name).read_text("utf-8")


@pytest.fixture(scope="module")
def small_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template whose versions have a file more each, a line more in notes.txt, and an engine.

    The engine of v0.3.0 has the package `archive`, too.
    """
    path = tmp_path_factory.mktemp("small") / "template"
    raw = path / "{{cookiecutter.name}}"
    raw.mkdir(parents=True)
    git(path.parent, "init", "--quiet", "--initial-branch=main", str(path))
    (raw / ".gitignore").write_text("build/\nmade.txt\n", "utf-8")
    (raw / "docs").mkdir()
    (raw / "src/onceward").mkdir(parents=True)
    for number in (1, 2, 3):
        version = f"0.{number}.0"
        (path / "cookiecutter.json").write_text(
            json.dumps({"name": "small", "_template_version": version}), "utf-8"
        )
        record = {"template_version": version, "cookiecutter": {"name": "{{cookiecutter.name}}"}}
        (raw / ".cookiecutter.json").write_text(json.dumps(record), "utf-8")
        with (raw / "notes.txt").open("a", encoding="utf-8") as notes:
            notes.write(f"As of {version}\n")
        (raw / "docs" / f"of_{number}.txt").write_text(f"{version}\n", "utf-8")
        engine = ["src/onceward/engine.py"] + ["src/onceward/archive/files.py"] * (number == 3)
        for name in engine:
            (raw / name).parent.mkdir(exist_ok=True)
            (raw / name).write_text(f"# {version}\n", "utf-8")
        checksum = hashlib.sha256(f"# {version}\n".encode()).hexdigest()
        checksums = "".join(f"{checksum}  {name}\n" for name in engine)
        (raw / ".engine.sha256").write_text(checksums, "utf-8")
        commit(path, version)
        git(path, "tag", f"v{version}")
    return path


@pytest.fixture
def small(small_template: Path, tmp_path: Path) -> Small:
    """A service whose branch `template` is made by an update to the version that it has."""
    return owned_small(small_template, tmp_path / "small")


def owned_small(template: Path, path: Path) -> Small:
    """Write the files of v0.1.0, and update to it, as cookiecutter would take longer."""
    path.mkdir(parents=True)
    inside = "{{cookiecutter.name}}"
    files = git(template, "ls-tree", "-r", "-z", "--name-only", f"v0.1.0:{inside}").split("\0")
    for name in filter(None, files):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(git(template, "show", f"v0.1.0:{inside}/{name}"), "utf-8")
    record = {
        "template": str(template),
        "commit": git(template, "rev-parse", "v0.1.0").strip(),
        "template_version": "0.1.0",
        "cookiecutter": {"name": "small"},
    }
    (path / ".cookiecutter.json").write_text(json.dumps(record, indent=4) + "\n", "utf-8")
    if "true" not in run(path, "git", "rev-parse", "--is-inside-work-tree").said:
        git(path, "init", "--quiet", "--initial-branch=main")
    for name, value in ADA.items():
        git(path, "config", name, value)
    commit(path, "Ada's")
    return Small(template, path)


@pytest.mark.full
@pytest.mark.slow
def test_an_update_that_was_reverted_is_merged_again_as_a_whole(small: Small) -> None:
    assert small.update("--to=v0.2.0").code == 0
    small.git("revert", "--no-edit", "-m", "1", "HEAD")
    assert not (small.path / "docs/of_2.txt").exists()

    outcome = small.update("--to=v0.3.0")

    assert outcome.code == 0, outcome.said
    assert small.read("notes.txt") == "As of 0.1.0\nAs of 0.2.0\nAs of 0.3.0\n"
    assert small.read("docs/of_2.txt") == "0.2.0\n"
    assert json.loads(small.read(".cookiecutter.json"))["template_version"] == "0.3.0"
    assert small.git("status", "--porcelain") == ""
    assert "Nothing to merge" in small.update("--to=v0.3.0").said


@pytest.mark.full
@pytest.mark.slow
def test_a_commit_on_the_branch_that_is_no_bake_is_refused(small: Small) -> None:
    assert small.update("--to=v0.2.0").code == 0
    bake = small.git("rev-parse", "template")
    (small.path / "mine.txt").write_text("Ada's\n", "utf-8")
    commit(small.path, "Mine")
    small.git("checkout", "--quiet", "template")
    small.git("merge", "--quiet", "main")
    small.git("checkout", "--quiet", "main")

    said = small.refusal("--to=v0.3.0")

    way = f"git branch --force template {bake[:10]}"
    assert f"`{way}`" in said
    small.git(*way.split()[1:])
    assert small.update("--to=v0.3.0").code == 0
    assert small.read("mine.txt") == "Ada's\n"


@pytest.mark.full
@pytest.mark.slow
def test_what_the_owner_ignores_elsewhere_is_of_the_bake(small: Small) -> None:
    (small.path / ".git/info/exclude").write_text("docs/\n", "utf-8")

    outcome = small.update("--to=v0.2.0")

    assert outcome.code == 0, outcome.said
    assert small.git("ls-files", "docs").split() == ["docs/of_1.txt", "docs/of_2.txt"]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("name", ["docs/of_2.txt", "docs/of_3.txt/more", "untracked"])
def test_a_file_that_is_not_in_git_is_not_overwritten(small: Small, name: str) -> None:
    if name == "untracked":
        name = "docs/of_2.txt"
    else:
        (small.path / ".git/info/exclude").write_text("docs/of_2.txt\ndocs/of_3.txt\n", "utf-8")
    (small.path / name).parent.mkdir(exist_ok=True)
    (small.path / name).write_text("Ada's\n", "utf-8")

    said = small.refusal("--to=v0.3.0")

    assert "files that are not in git" in said
    assert name.removesuffix("/more") in said
    assert small.read(name) == "Ada's\n"


@pytest.mark.full
@pytest.mark.slow
def test_a_hidden_file_beside_an_unedited_engine_is_kept(small: Small) -> None:
    (small.path / "src/onceward/.notes").write_text("Ada's\n", "utf-8")
    commit(small.path, "Notes")

    outcome = small.update("--to=v0.2.0")

    assert outcome.code == 0, outcome.said
    assert small.read("src/onceward/.notes") == "Ada's\n"
    assert small.read("src/onceward/engine.py") == "# 0.2.0\n"
    assert small.git("status", "--porcelain") == ""


@pytest.mark.full
@pytest.mark.slow
def test_an_owners_package_is_merged_with_one_that_the_engine_gains(small: Small) -> None:
    (small.path / "src/onceward/archive").mkdir()
    for name in ("mine.py", "files.py"):
        (small.path / "src/onceward/archive" / name).write_text("# Ada's\n", "utf-8")
    commit(small.path, "Archive")

    outcome = small.update("--to=v0.3.0")

    assert outcome.code == 1, outcome.said
    assert small.git("diff", "--name-only", "--diff-filter=U") == "src/onceward/archive/files.py"
    assert small.read("src/onceward/archive/mine.py") == "# Ada's\n"
    assert {"# Ada's", "# 0.3.0"} < set(small.read("src/onceward/archive/files.py").splitlines())
    assert small.read("src/onceward/engine.py") == "# 0.3.0\n"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("last", ["0.3.0", "0.3.1"])
def test_a_major_version_is_reached_from_the_last_version_before_it(
    small: Small, tmp_path: Path, last: str
) -> None:
    git(tmp_path, "clone", "--quiet", str(small.template), "next")
    questions = tmp_path / "next" / "cookiecutter.json"
    for version in (*[last][last == "0.3.0" :], "1.0.0", "1.1.0"):
        edit(questions, (r'(?<="_template_version": ")[\d.]+', version))
        git(tmp_path / "next", "tag", f"v{version}", commit(tmp_path / "next", version))
    location = f"--template={tmp_path / 'next'}"

    assert f"update to v{last} first" in small.refusal(location)
    if last != "0.3.0":
        assert small.update(location, "--to=v0.3.0").code == 0
    assert f"update to v{last} first" in small.refusal(location, "--to=v1.0.0")
    assert small.update(location, f"--to=v{last}").code == 0
    assert small.update(location).code == 0
    newest = git(tmp_path / "next", "rev-parse", "v1.1.0").strip()
    assert json.loads(small.read(".cookiecutter.json"))["commit"] == newest


@pytest.mark.full
@pytest.mark.slow
def test_a_clone_without_tags_has_the_releases_that_its_newest_commit_lists(
    small: Small, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", str(small.template), "bare")
    bare = tmp_path / "bare"
    tags = git(bare, "tag").split()
    releases = [
        {"version": tag[1:], "commit": git(bare, "rev-parse", tag).strip()} for tag in tags[:2]
    ]
    (bare / "releases.json").write_text(json.dumps(releases), "utf-8")
    commit(bare, "List releases")
    git(bare, "tag", "--delete", *tags)
    location = f"--template={bare}"

    assert small.update(location).code == 0
    assert json.loads(small.read(".cookiecutter.json"))["commit"] == releases[1]["commit"]
    assert "has no version 0.3.0" in small.refusal(location, "--to=0.3.0")
    for name in ("0.1.0", "v0.1.0"):
        assert small.update(location, f"--to={name}").code == 0
        assert json.loads(small.read(".cookiecutter.json"))["commit"] == releases[0]["commit"]
        assert small.update(location, "--to=v0.2.0").code == 0


@pytest.mark.full
@pytest.mark.slow
def test_a_release_whose_commit_the_template_lacks_is_left_out(
    small: Small, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "--quiet", "--no-tags", str(small.template), "bare")
    bare = tmp_path / "bare"
    releases = [
        {"version": "0.2.0", "commit": git(small.template, "rev-parse", "v0.2.0").strip()},
        {"version": "0.3.0", "commit": "0" * 40},
    ]
    (bare / "releases.json").write_text(json.dumps(releases), "utf-8")
    commit(bare, "List releases")

    assert small.update(f"--template={bare}").code == 0
    assert json.loads(small.read(".cookiecutter.json"))["commit"] == releases[0]["commit"]


@pytest.mark.full
@pytest.mark.slow
def test_a_merge_that_git_refuses_leaves_no_commit_behind(small: Small) -> None:
    small.git("config", "merge.verifySignatures", "true")

    assert "Nothing was merged" in small.refusal("--to=v0.2.0")


SYSTEMS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
"""Files of the certificate authorities that a system trusts."""
TRUSTING = 'mount --bind "$0" "$1" && shift && exec "$@"'


@pytest.mark.full
@pytest.mark.slow
def test_an_update_works_behind_a_proxy_that_intercepts_tls(small: Small, tmp_path: Path) -> None:
    """The system trusts the proxy's authority, and no other does."""
    packages, repositories = "packages.example.org", "git.example.org"
    hosts = tmp_path / "hosts"
    offer_cookiecutter(hosts / packages / "simple" / "cookiecutter")
    bare = hosts / repositories / "template.git"
    git(tmp_path, "clone", "--quiet", "--bare", str(small.template), str(bare))
    git(bare, "update-server-info")
    trusted, certificate = authority(tmp_path, [packages, repositories])
    system = next(name for name in SYSTEMS if Path(name).exists())
    made = with_make(small, tmp_path / "venv")

    def outcome(**environment: str) -> Outcome:
        given = [f"{name}={value}" for name, value in environment.items()]
        namespace = ("unshare", "--user", "--map-root-user", "--mount")
        trusting = ("bash", "-euc", TRUSTING, str(trusted), system)
        location = f"TEMPLATE=https://{repositories}/template.git"
        return run(small.path, "env", "-i", *given, *namespace, *trusting, *made, location)

    with intercepting(hosts, certificate) as proxy:
        usual = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
            "HTTPS_PROXY": f"http://127.0.0.1:{proxy.server_port}",
            "UV_DEFAULT_INDEX": f"https://{packages}/simple",
            "UV_CACHE_DIR": str(tmp_path / "cache"),
            "UV_HTTP_RETRIES": "0",
        }
        failed = outcome(**usual, UV_SYSTEM_CERTS="false")
        assert failed.code != 0, failed.said
        assert (proxy.connected, proxy.served) == ({packages}, set())

        updated = outcome(**usual)

        assert updated.code == 0, updated.said
        assert proxy.served == {packages, repositories}
    assert small.read("notes.txt") == "As of 0.1.0\nAs of 0.2.0\nAs of 0.3.0\n"


def offer_cookiecutter(folder: Path) -> None:
    """Write the page and the wheel of a package index, which runs the cookiecutter of the tests."""
    name = "cookiecutter-2.6.0"
    command = [sys.executable, "-m", "cookiecutter"]
    files = {
        "cookiecutter/__init__.py": "",
        "cookiecutter/__main__.py": "import subprocess, sys\n"
        f"sys.exit(subprocess.call([*{command!r}, *sys.argv[1:]]))\n",
        f"{name}.dist-info/METADATA": "Metadata-Version: 2.1\nName: cookiecutter\nVersion: 2.6.0\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{name}.dist-info/RECORD"] = "".join(
        f"{path},,\n" for path in (*files, f"{name}.dist-info/RECORD")
    )
    folder.mkdir(parents=True)
    with ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    link = f'<a href="{name}-py3-none-any.whl">{name}-py3-none-any.whl</a>'
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{link}</body></html>", "utf-8")


def with_make(small: Small, environment: Path) -> list[str]:
    """Give a service its Makefile and an environment that has uv, and no cookiecutter.

    Returns the command that updates it.
    """
    shutil.copy(RAW / "Makefile", small.path)
    (small.path / "dev").mkdir()
    for file in RAW.glob("dev/*.py"):
        shutil.copy(file, small.path / "dev")
    pins = small.path / "requirements" / "dev.txt"
    pins.parent.mkdir()
    pins.touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (environment / "bin" / "uv").symlink_to(UV)
    checksum = subprocess.check_output(["cksum"], stdin=pins.open("rb"), text=True).split()[0]
    (environment / f".installed-{checksum}").touch()
    return ["make", f"VENV={environment}", "update"]


@pytest.mark.full
@pytest.mark.slow
def test_the_variables_of_another_repository_are_not_used(small: Small, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=other", "other")
    other = tmp_path / "other"
    commit(other, "Other")
    before = git(other, "for-each-ref")
    index = {"GIT_DIR": str(other / ".git"), "GIT_WORK_TREE": str(other)}

    outcome = small.update("--to=v0.2.0", **index, GIT_INDEX_FILE="none", GIT_PREFIX="docs/")

    assert outcome.code == 0, outcome.said
    assert small.read("docs/of_2.txt") == "0.2.0\n"
    assert git(other, "for-each-ref") == before


@pytest.mark.full
@pytest.mark.slow
def test_a_password_in_a_given_location_is_neither_recorded_nor_printed(
    small: Small,
) -> None:
    rewritten = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{small.template}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://ada:secret@example.org/t",
    }
    location = "--template=https://ada:secret@example.org/t"

    assert "secret" not in small.refusal(location, "--to=v7", **rewritten)
    outcome = small.update(location, "--to=v0.2.0", **rewritten)

    assert outcome.code == 0, outcome.said
    assert json.loads(small.read(".cookiecutter.json"))["template"] == "https://example.org/t"
    assert "secret" not in outcome.said + small.git("log", "--all", "--patch")


@pytest.mark.full
@pytest.mark.slow
def test_an_operation_that_is_not_finished_is_refused(small: Small, tmp_path: Path) -> None:
    for name, line in (("side", "Side"), ("main", "Main")):
        small.git("checkout", "--quiet", "-B", name, "main")
        if name == "main":
            small.git("reset", "--quiet", "--hard", "side~1")
        (small.path / "notes.txt").write_text(f"{line}\n", "utf-8")
        commit(small.path, line)

    for begin, end, said in (
        (("cherry-pick", "side"), ("cherry-pick", "--abort"), "a cherry-pick is not finished"),
        (("rebase", "side"), ("rebase", "--abort"), "a rebase is not finished"),
        (("bisect", "start"), ("bisect", "reset"), "a bisection is not finished"),
        (("checkout", "--quiet", "--detach"), ("checkout", "--quiet", "main"), "HEAD is detached"),
    ):
        run(small.path, "git", *begin)
        if "cherry-pick" in begin or "rebase" in begin:
            small.git("checkout", "--quiet", "HEAD", "--", ".")  # a clean tree, and yet unfinished
        assert said in small.refusal("--to=v0.2.0")
        small.git(*end)
    assert small.update("--to=v0.2.0").code in (0, 1)


@pytest.mark.full
@pytest.mark.slow
def test_a_folder_that_makes_no_name_of_a_branch_is_refused(
    small_template: Path, tmp_path: Path
) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    spaced = owned_small(small_template, tmp_path / "my apps" / "small")

    assert "rename the folder" in spaced.refusal("--to=v0.2.0")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> History:
    """The history of this repository, with the working tree as its newest commit."""
    if git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("this clone is shallow: it has no old commits (git fetch --unshallow)")
    if int(git(ROOT, "rev-list", "--first-parent", "--count", "HEAD")) <= AGES[-1]:
        pytest.skip(f"this repository has no {AGES[-1]} commits")
    folder = tmp_path_factory.mktemp("grown")
    (folder / "home" / "tmp").mkdir(parents=True)
    (folder / "home" / "config.yaml").write_text(
        f"cookiecutters_dir: {folder}\nreplay_dir: {folder / 'replay'}\n", "utf-8"
    )
    path = folder / "template"
    git(folder, "clone", "--quiet", str(ROOT), str(path))
    git(path, "checkout", "--quiet", "-B", "main")
    old = git(path, "rev-parse", "HEAD").strip()
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path / name)
        else:
            (path / name).unlink(missing_ok=True)
    return History(Template(path, folder / "home"), old, commit(path, "The working tree"))


@pytest.mark.full
@pytest.mark.parametrize("version", [*map(str, AGES), *(one["commit"] for one in released())])
def test_a_service_of_an_old_commit_or_release_is_updated(
    grown: History, output: Path, version: str
) -> None:
    fresh = grown.bake(output / "fresh", grown.new)
    if is_age := len(version) < 40:
        old, baked = grown.bake_aged(output, int(version))
    else:
        old, baked = version, grown.bake(output, version)
    project = without_unmarked(owned(baked))

    updater = UPDATE if is_age else project.path / "dev/update.py"
    options = (f"--template={grown.template.path}", f"--from={old}", f"--to={grown.new}")
    outcome = run(project.path, sys.executable, str(updater), *options)

    assert outcome.code == (1 if conflicts(project) else 0), outcome.said
    assert "What to do next" in outcome.said
    assert_merged(project, fresh)


@pytest.mark.full
@pytest.mark.parametrize(("old", "new"), [("yes", "parcels"), ("no", "none")])
def test_a_service_of_1_0_keeps_its_worked_example_or_goes_without(
    grown: History, output: Path, old: str, new: str
) -> None:
    """Until 1.0 the question was answered by yes or no."""
    asked = '-S"worked_example": "yes"'
    changed = git(ROOT, "log", "-1", "--format=%H", asked, "--", "cookiecutter.json").strip()
    fresh = grown.bake(output / "fresh", grown.new, worked_example=new)
    project = grown.bake(output, f"{changed}^", worked_example=old)
    for name, value in ADA.items():
        project.run("git", "config", name, value)
    recorded = json.loads(project.read(".cookiecutter.json"))["cookiecutter"]
    assert recorded["worked_example"] == old

    updater = str(project.path / "dev/update.py")
    location = (f"--template={grown.template.path}", f"--to={grown.new}")
    outcome = run(project.path, sys.executable, updater, *location)

    assert outcome.code == 0, outcome.said
    assert project.files() == fresh.files()


@pytest.mark.full
def test_a_service_of_an_old_commit_with_an_edited_engine_is_updated(
    grown: History, output: Path
) -> None:
    old, baked = grown.bake_aged(output, AGES[0])
    project = without_unmarked(owned(baked))
    engines = (project.path / "src" / one for one in ("onceward", "pipeline"))
    [engine] = (one for one in engines if one.exists())
    edit(engine / "settings.py", (r"\Z", "# Ada's.\n"))
    commit(project.path, "The engine")

    location = f"--template={grown.template.path}"
    outcome = update(project.path, location, f"--from={old}", f"--to={grown.new}")

    assert "What to do next" in outcome.said
    assert project.read("src/onceward/settings.py").endswith("# Ada's.\n")
    assert conflicts(project) <= {path.format(package=project.package) for path in EDITS}


@pytest.mark.full
def test_names_moved_since_1_0_are_imported_from_their_old_place(
    grown: History, output: Path
) -> None:
    (old,) = [one["commit"] for one in released() if one["version"] == "1.0.0"]
    project = without_unmarked(owned(grown.bake(output, old)))
    codecs = project.path / "src" / project.package / "codecs.py"
    codecs.write_text("from pipeline import Plain, Position\n\nPlain('a', Position())\n", "utf-8")
    commit(project.path, "A codec")

    location = f"--template={grown.template.path}"
    outcome = update(project.path, location, f"--from={old}", f"--to={grown.new}")
    command = (sys.executable, "-W", "default", "-c", f"import {project.package}.codecs")
    imported = run(project.path, *command, PYTHONPATH="src")

    assert "What to do next" in outcome.said
    assert imported.code == 0, imported.said
    assert "import Plain from onceward.plain, not from onceward" in imported.said


@pytest.mark.full
def test_a_service_of_the_same_commit_gets_other_answers(grown: History, output: Path) -> None:
    answers = dict.fromkeys(("outside_calls", "object_store", "operations_page"), "no")
    fresh = grown.bake(output / "fresh", grown.new, **answers)
    project = owned(grown.bake(output, grown.new))

    outcome = update(project.path, *(f"{name}={answer}" for name, answer in answers.items()))

    assert outcome.code == (1 if conflicts(project) else 0), outcome.said
    assert_merged(project, fresh)
