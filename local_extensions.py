"""Checks of the answers. Cookiecutter loads this extension before it prompts."""

import builtins
import functools
import json
import keyword
import os
import re
import runpy
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

NEEDED = (2, 6)
"""The first version of cookiecutter that finds a template folder with custom delimiters."""

SERVICE = Path(__file__).parent / "<<cookiecutter.service_name>>"
"""The files that a service is generated from."""

PINS = SERVICE / "requirements" / "dev.txt"

LIBRARIES = frozenset(re.findall(r"^([a-z0-9-]+)==", PINS.read_text("utf-8"), re.MULTILINE))
"""Distributions that a generated service needs to run and for development."""

DISTRIBUTION = "onceward"
"""The engine's, on which a service may depend."""

IMPORTS = Path(__file__).parent / "imports.txt"
"""Names of modules that these have or import, also optional ones; `make requirements` writes it."""

IMPORTED = frozenset(IMPORTS.read_text("utf-8").split())

BUILT = frozenset({"build", "demo", "dist", "test"})
"""Folders and commands that a service gets after its generation."""

RECORD = Path.cwd() / ".cookiecutter.json"
"""Answers of the service that `make update` runs in."""

TAKEN = BUILT | {
    path.stem if path.suffix == ".py" else path.name
    for folder in (".", "dev", "src", "tests")
    for path in (SERVICE / folder).iterdir()
}
"""Names of folders and modules in the four folders that mypy and pytest import from."""

EXAMPLES = ("parcels", "payments", "none")

OLD_EXAMPLES = ("yes", "no")
"""Answers of services of 1.0, which mean parcels and none in all files; `make update` gives them
again."""

ENGINES = ("source", "package")

FEATURES = tuple(
    name
    for name in json.loads((SERVICE / ".features.json").read_text("utf-8"))
    if name not in EXAMPLES
)
"""Questions with the answers yes and no."""

LONGEST_NAME = 40
"""Leaves room for suffixes within the 63 characters of a host name or database name."""

LONGEST_LINE = 80

UNUSABLE = ':$%"\\`'
"""Characters of a path that PATH, shells or .ini files would not take literally, as in `make`."""

OURS = (
    "<<cookiecutter.service_name>>",
    "<<cookiecutter.package_name>>",
    '<<cookiecutter.service_name.replace("-", "_")>>',
    "<<cookiecutter | checked>>",
    "<<cookiecutter | tojson>>",
    "<<cookiecutter | source | tojson>>",
)
"""All expressions that this template renders outside of its files: defaults, file names, hooks."""

OF_A_REPOSITORY = {
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_GRAFT_FILE"),
    *("GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY"),
    *("GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_WORK_TREE"),
}
"""Variables that hooks and aliases of git set, which may name another repository."""

DELIMITERS = ("<<", ">>", "# <%", "%>", "# <#", "#>")


class Answers(Extension):
    """Rejects answers that contain template code or are invalid."""

    def __init__(self, environment: Environment) -> None:
        found = version("cookiecutter")
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < NEEDED:
            raise FailedHookException(
                "Nothing was generated. This template needs cookiecutter 2.6 or newer, and this is "
                f'{found}: run python3 -m pip install --upgrade "cookiecutter>=2.6"'
            )
        super().__init__(environment)
        environment.filters["checked"] = checked
        environment.filters["source"] = source

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Reject template code in answers, and check the answers before the first folder.

        Cookiecutter renders answers of the command line and of the user's configuration as
        templates, which can run any code. It does not render answers that are replayed from a file:
        these are checked when it renders the name of the service's folder, before any other text.
        """
        if name is None:
            rest = functools.reduce(lambda text, ours: text.replace(ours, " "), OURS, source)
            found = [delimiter for delimiter in DELIMITERS if delimiter in rest]
            if found:
                raise FailedHookException(
                    f"Nothing was generated. An answer contains {' and '.join(found)}, which "
                    "would be run as a template: remove it."
                )
            if source == SERVICE.name:
                return source + "<<'' if cookiecutter | checked>>"
        return source


def checked(answers: Mapping[str, object]) -> str:
    """Return "yes". Raises `FailedHookException` if an answer is invalid.

    It runs after the last question, and again before the service's folder is created, which is the
    first check of answers that are replayed from a file. Nothing is written before.
    """
    found = mistakes(answers)
    folder = str(answers.get("_output_dir", ""))
    if any(character in folder for character in UNUSABLE):
        characters = " ".join(UNUSABLE)
        found.append(
            f"a service can't run in {folder}, as tools give one of {characters} another meaning:"
            " generate it in another folder, with --output-dir."
        )
    if found:
        raise FailedHookException("\n  - ".join(["Nothing was generated.", *found]))
    return "yes"


def source(answers: Mapping[str, object]) -> dict[str, object]:
    """Return the template's location and its commit, for `.cookiecutter.json`, and the wheel.

    The location is the absolute path of a local folder, the URL of the repository that cookiecutter
    cloned (without password or token), or else the given one. The commit is null if the template is
    not a git repository of its own, or has uncommitted changes.
    """
    location = str(answers.get("_template", ""))
    folder = SERVICE.parent.resolve()
    top = _git(folder, "rev-parse", "--show-toplevel")
    is_repository = top is not None and Path(top).resolve() == folder
    if answers["_repo_dir"] == location:
        location = str(folder)
    elif is_repository:
        location = _git(folder, "remote", "get-url", "origin") or location
    is_clean = is_repository and _git(folder, "status", "--porcelain") == ""
    return {
        "template": without_password(location),
        "commit": _git(folder, "rev-parse", "HEAD") if is_clean else None,
        "wheel": _wheel(answers),
    }


def _wheel(answers: Mapping[str, object]) -> object:
    """Return what a service requires in place of the engine's source; None if it has that."""
    if answers.get("engine") != "package":
        return None
    return runpy.run_path(str(SERVICE.parent / "engine_wheel.py"))["requirement"]()


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output; None if git fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            env={name: value for name, value in os.environ.items() if name not in OF_A_REPOSITORY},
            capture_output=True,
            encoding="utf-8",
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def without_password(location: str) -> str:
    """Return a location without its password; one of HTTP also without its user."""
    # Also matches an unescaped slash in a password, where the text after the colon is not a port.
    user = r"[^/?#]*@|[^/?#@:\[]*:(?!\d*([/?#]|$)).*@"
    kept = re.sub(rf"(?i)(?<=\bhttp://)({user})|(?<=\bhttps://)({user})", "", location, count=1)
    return re.sub(r"(?<=://)[^/@]*:[^/]*@", "", kept, count=1)


def mistakes(answers: Mapping[str, object]) -> list[str]:
    """Return a sentence for each invalid answer, with the rule for it.

    Missing answers are skipped: when a file is replayed, cookiecutter first passes the answers that
    the file does not have.
    """
    found = []
    for question, check in CHECKS.items():
        if question not in answers:
            continue
        answer = answers[question]
        # In YAML, yes, no, on, off and numbers are not text.
        rule = check(answer) if isinstance(answer, str) else "must be text, in quotes in YAML"
        if not rule:
            continue
        sentence = f"{question} {rule}; it is {answer!r}."
        if rule in OF_LIBRARIES and _recorded().get(question) == answer:
            print(f"warning: {sentence} The service has this name already and keeps it.")
        else:
            found.append(sentence)
    if answers.get("engine") == "package" and answers.get("engine_tests") == "yes":
        found.append("engine_tests must be no if engine is package, whose source is elsewhere.")
    return found


def _recorded() -> Mapping[str, object]:
    """Return the answers of the service that is updated; none if a service is generated."""
    try:
        recorded: Mapping[str, object] = json.loads(RECORD.read_text("utf-8"))["cookiecutter"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return recorded


OF_LIBRARIES = (
    "must not be the name of a library that the service uses",
    "must not be the name of a module that a library of the service has or imports",
)
"""Rules that gain names with the libraries of a new version: services that have them keep them."""


def _service_name(answer: str) -> str | None:
    if not _is_name(answer, "[a-z][a-z0-9]*(-[a-z0-9]+)*"):
        return (
            "must be lower-case letters, digits and single hyphens between them, beginning with a "
            f"letter, of at most {LONGEST_NAME} characters"
        )
    if answer in LIBRARIES or answer == DISTRIBUTION:
        return OF_LIBRARIES[0]
    return None


def _package_name(answer: str) -> str | None:
    if not _is_name(answer, "[a-z][a-z0-9_]*"):
        return (
            "must be lower-case letters, digits and underscores, beginning with a letter, of at "
            f"most {LONGEST_NAME} characters"
        )
    if keyword.iskeyword(answer) or keyword.issoftkeyword(answer) or hasattr(builtins, answer):
        return "must not be a keyword or built-in name of Python"
    if answer in sys.stdlib_module_names:
        return "must not be the name of a module of Python's standard library"
    if answer in TAKEN:
        return "must not be the name of another folder or module of the service"
    if answer in IMPORTED or answer.replace("_", "-") in LIBRARIES:
        return OF_LIBRARIES[1]
    return None


def _description(answer: str) -> str | None:
    if not _is_line(answer, ".,:;!?'’()/+&@_–—-"):
        return (
            "must be one line of letters, digits, single spaces and . , : ; ! ? ' ( ) / + & @ _ -, "
            f"beginning with a letter or digit, of at most {LONGEST_LINE} characters"
        )
    return None


def _author(answer: str) -> str | None:
    name = re.sub(r" <[\w+-]+(\.[\w+-]+)*@[\w-]+(\.[\w-]+)+>\Z", "", answer, flags=re.ASCII)
    if not _is_line(name, ".,'’()&–-") or _columns(answer) > LONGEST_LINE:
        return (
            "must be a name of letters, digits, single spaces and . , ' ( ) & -, beginning with a "
            "letter or digit, alone or followed by <mail@address>, of at most "
            f"{LONGEST_LINE} characters"
        )
    return None


def _example(answer: str) -> str | None:
    if answer not in EXAMPLES + OLD_EXAMPLES:
        return "must be parcels, payments or none"
    return None


def _engine(answer: str) -> str | None:
    return None if answer in ENGINES else "must be source or package"


def _yes_or_no(answer: str) -> str | None:
    return None if answer in ("yes", "no") else "must be yes or no"


CHECKS: dict[str, Callable[[str], str | None]] = {
    "service_name": _service_name,
    "package_name": _package_name,
    "description": _description,
    "author": _author,
    "worked_example": _example,
    **dict.fromkeys(FEATURES, _yes_or_no),
    "engine": _engine,
}


def _is_name(text: str, pattern: str) -> bool:
    return len(text) <= LONGEST_NAME and re.fullmatch(pattern, text, re.ASCII) is not None


def _is_line(text: str, punctuation: str) -> bool:
    """Whether `text` has no special meaning in TOML, JSON, YAML, Python, make or a shell.

    In these languages, the template uses the text only between double quotes, or not at all.
    """
    return (
        text != ""
        and _columns(text) <= LONGEST_LINE
        and text[0].isalnum()
        and text == " ".join(text.split())
        and all(
            character == " "
            or character in punctuation
            or unicodedata.category(character)[0] in "LMN"
            for character in text
        )
    )


def _columns(text: str) -> int:
    """Return the width of `text` in columns; a Chinese character has two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "FW" else 1 for letter in text)
