"""After the last file: remove features that are not chosen, record the template, run `git init`."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

# The output of `tojson` has no ' and no line breaks.
ANSWERS = json.loads(r'<<cookiecutter | tojson>>')  # fmt: skip
SOURCE = json.loads(r'<<cookiecutter | source | tojson>>')  # fmt: skip
MANIFEST = Path(".features.json")
RECORD = Path(".cookiecutter.json")
CHECKSUMS = Path(".engine.sha256")
ENGINE = ("src/onceward",)
# Distributions that the service's own files import, or that the engine's wheel does not require.
OWN = {
    *("aiokafka", "alembic", "asyncpg", "fastapi", "httpx2", "pydantic", "pydantic-settings"),
    *("opentelemetry-instrumentation-httpx", "sqlalchemy"),
}
# Variables that hooks and aliases of git set, which may name another repository.
OF_A_REPOSITORY = {
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_GRAFT_FILE"),
    *("GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY"),
    *("GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_WORK_TREE"),
}


def remove(path: Path) -> None:
    """Delete a file or a folder, unless it is gone with the folder that had it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_requirement(name: str) -> None:
    """Remove a distribution from all requirements files. Raises `SystemExit` if none has it."""
    # With its hashes, which are on further lines.
    requirement = rf"(?m)^{re.escape(name)}(?:[=>](?:.*\\\n)*.*)?\n"
    found = 0
    for path in Path("requirements").iterdir():
        text, count = re.subn(requirement, "", path.read_text("utf-8"))
        path.write_text(text, "utf-8")
        found += count
    if not found:
        raise SystemExit(f"{MANIFEST} names the requirement {name}, which no file has")


def require_engine() -> None:
    """Replace the source of the engine by a requirement."""
    wheel = SOURCE["wheel"]
    for folder in ENGINE:
        remove(Path(folder))
    for name in ("grimp", "import-linter"):  # whose rules are about the engine
        remove_requirement(name)
    extras = ",".join(
        sorted(extra for name, extra in wheel["extras"].items() if ANSWERS.get(name) == "yes")
    )
    requirement = f"{wheel['name']}[{extras}]" if extras else wheel["name"]
    path = Path("requirements/base.in")
    lines = path.read_text("utf-8").splitlines(keepends=True)
    own = [one for one in lines if one[0] == "#" or re.split(r"[^\w-]", one)[0] in OWN]
    own.append(f"{requirement}=={wheel['version']} # the engine\n")
    own.sort(key=lambda line: (line[0] != "#", re.split(r"[^\w-]", line)[0]))
    path.write_text("".join(own), "utf-8")
    # The hash is that of each build from these files. Only the company's index has it.
    pin = f"{wheel['name']}=={wheel['version']} \\\n    --hash=sha256:{wheel['hash']}\n"
    for path in (Path("requirements/base.txt"), Path("requirements/dev.txt")):
        text = path.read_text("utf-8")
        pins = re.finditer(r"(?m)^([a-z][\w-]*)", text)
        place = next((one.start() for one in pins if one[1] > wheel["name"]), len(text))
        path.write_text(text[:place] + pin + text[place:], "utf-8")


def git(*arguments: str, given: str = "") -> str:
    """Run git with `given` as its input, and return its output.

    Raises `CalledProcessError` if it fails.
    """
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_REPOSITORY}
    return subprocess.run(
        ["git", *arguments],
        env={**kept, "LC_ALL": "C"},
        input=given,
        capture_output=True,
        check=True,
        encoding="utf-8",
        errors="replace",
    ).stdout


def make_repository() -> str:
    """Commit the service to a new repository, unless one has it; return a message about it.

    A repository around it that ignores all its files does not have it.

    `make update` merges from the branch `template`. The first commit runs no hooks and is not
    signed, as both could prompt for input; without an identity of the user it has a neutral one.
    """
    if shutil.which("git") is None:
        return "git is not installed, so it has no repository; `make update` needs one."
    try:
        repository = git("rev-parse", "--show-toplevel").strip()
    except subprocess.CalledProcessError as error:
        if "not a git repository" not in error.stderr:
            return f"It has no repository: {error.stderr.strip()}"
    else:
        made = {path.as_posix() for path in Path().rglob("*") if path.is_file()}
        known = git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
        ignored = sorted(made - set(known))
        if not ignored:
            return f"It is in the git repository {repository}: commit it there."
        if len(ignored) < len(made):
            more = f" and {len(ignored) - 5} more" if len(ignored) > 5 else ""
            return (
                f"It is in the git repository {repository}, which ignores {', '.join(ignored[:5])}"
                f"{more}: commit it there with git add --force {Path.cwd().name}."
            )
    try:
        git("var", "GIT_COMMITTER_IDENT")
        identity = []
    except subprocess.CalledProcessError:
        identity = ["-c", "user.name=cookiecutter", "-c", "user.email=cookiecutter@localhost"]
    plain = ("-c", f"core.hooksPath={os.devnull}", "-c", "commit.gpgSign=false")
    version = f"{ANSWERS['_template_version']} ({SOURCE['commit'] or 'no commit'})"
    try:
        git("init", "--quiet")
        git("symbolic-ref", "HEAD", "refs/heads/template")
        # Files are ignored by the .gitignore of the service only, not by the user's settings.
        files = git("ls-files", "--others", "--exclude-per-directory=.gitignore", "-z")
        git("update-index", "--add", "-z", "--stdin", given=files)
        # `dev/update.py` identifies bakes by this trailer.
        mark = f"Template-Tree: {git('write-tree').strip()}"
        message = ("--message", f"Template {version}", "--message", mark)
        git(*plain, *identity, "commit", "--quiet", *message)
        git(*plain, "checkout", "--quiet", "-b", "main")
    except subprocess.CalledProcessError as error:
        shutil.rmtree(".git", ignore_errors=True)
        return f"It has no repository: {error.stderr.strip() or error}"
    return "Its first commit is on the branches main, for you, and template, for `make update`."


# Features may share files and requirements, so all are collected before any is removed. A file is
# removed if one of its features is not chosen, a requirement or what is shared if none of them is.
example = {"yes": "parcels", "no": "none"}.get(ANSWERS["worked_example"], ANSWERS["worked_example"])
named: dict[str, set[str]] = {"yes": set(), "no": set()}
for feature, names in json.loads(MANIFEST.read_text("utf-8")).items():
    is_chosen = feature == example or ANSWERS.get(feature) == "yes"
    named["yes" if is_chosen else "no"].update(names)
unwanted = [each for each in sorted(named["no"]) if ": " not in each or each not in named["yes"]]
required = [
    each.removeprefix("requirements: ") for each in unwanted if each.startswith("requirements: ")
]
paths = [
    Path(each.removeprefix("shared: "))
    for each in unwanted
    if not each.startswith("requirements: ")
]
for path in paths:
    if not path.exists():
        raise SystemExit(f"{MANIFEST} names {path}, which does not exist")
for name in required:
    remove_requirement(name)
for path in [*paths, MANIFEST]:
    remove(path)
if ANSWERS.get("engine") == "package":
    require_engine()

# The pages are copied as they are, and name the service of the default answers.
for path in Path("docs").glob("*.md"):
    text = path.read_text("utf-8").replace("parcel-tracker", ANSWERS["service_name"])
    path.write_text(text.replace("parcel_tracker", ANSWERS["package_name"]), "utf-8")

# Caches from a local folder of the template in which tests have run.
for pattern in ("__pycache__", ".*_cache", ".hypothesis"):
    for cache in list(Path().rglob(pattern)):
        remove(cache)

source = {"template": SOURCE["template"], "commit": SOURCE["commit"]}  # `tojson` sorts
record = {**source, **json.loads(RECORD.read_text("utf-8"))}
RECORD.write_text(json.dumps(record, indent=4, ensure_ascii=False) + "\n", "utf-8")

# Checksums for `dev/engine.py`, in the format of `sha256sum`.
checksums = "".join(
    f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.as_posix()}\n"
    for path in sorted(path for folder in ENGINE for path in Path(folder).rglob("*"))
    if path.is_file()
)
if checksums:
    CHECKSUMS.write_text(checksums, "utf-8")

print(f"\n{ANSWERS['service_name']} was generated. {make_repository()}")
print(f"Next: cd {Path.cwd().name} && make run")
