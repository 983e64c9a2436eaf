"""What stands between the answers and the template: cookiecutter loads it before it asks."""

import builtins
import functools
import json
import keyword
import os
import re
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
"""The first cookiecutter that finds a template by delimiters of the template's own."""

SERVICE = Path(__file__).parent / "<<cookiecutter.service_name>>"
"""What a service is generated from."""

PINS = SERVICE / "requirements" / "dev.txt"

LIBRARIES = frozenset(re.findall(r"^([a-z0-9-]+)==", PINS.read_text("utf-8"), re.MULTILINE))
"""The distributions that a generated service is run and developed with."""

OTHERWISE_IMPORTED = frozenset(
    {"attr", "dotenv", "google", "grpc", "grpc_tools", "importlinter", "markdown_it", "mypyc"}
    | {"opentelemetry", "pkg_resources", "py", "rpds", "xdist"}
)
"""Import names of theirs that do not follow from the distributions' names."""

BUILT = frozenset({"build", "demo", "dist", "test"})
"""Folders and commands that are not in the tree of a service from the start."""

TAKEN = BUILT | {
    path.stem if path.suffix == ".py" else path.name
    for folder in (".", "dev", "src", "tests")
    for path in (SERVICE / folder).iterdir()
}
"""Names of folders and modules of a service; mypy and pytest import from these four folders."""

FEATURES = tuple(json.loads((SERVICE / ".features.json").read_text("utf-8")))
"""Questions that are answered by yes or no."""

LONGEST_NAME = 40
"""Leaves room for what is put behind it in the 63 characters of a host or a database name."""

LONGEST_LINE = 80

OURS = (
    "<<cookiecutter.service_name>>",
    "<<cookiecutter.package_name>>",
    '<<cookiecutter.service_name.replace("-", "_")>>',
    "<<cookiecutter | checked>>",
    "<<cookiecutter | tojson>>",
    "<<cookiecutter | source | tojson>>",
)
"""All that this template has rendered outside its files: defaults, names of files, hooks."""

OF_A_REPOSITORY = {
    *("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_GRAFT_FILE"),
    *("GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY"),
    *("GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_WORK_TREE"),
}
"""Variables that a hook or an alias of git sets, and that name a repository other than this."""

DELIMITERS = ("<<", ">>", "# <%", "%>", "# <#", "#>")


class Answers(Extension):
    """Sees to it that answers are plain text, and that wrong ones stop everything."""

    def __init__(self, environment: Environment) -> None:
        found = version("cookiecutter")
        if tuple(map(int, re.findall(r"\d+", found)[:2])) < NEEDED:
            raise FailedHookException(
                "Nothing was generated. This template needs cookiecutter 2.6 or newer, this is "
                f'{found}: python3 -m pip install --upgrade "cookiecutter>=2.6"'
            )
        super().__init__(environment)
        environment.filters["checked"] = checked
        environment.filters["source"] = source

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Refuse to run what was given as an answer, and judge answers before the first folder.

        Cookiecutter renders the answers of its command line and of the user's configuration as
        templates, and a template can run anything. Answers that are replayed from a file it does
        not render; the name of the folder to create is the first that it renders with them.
        """
        if name is None:
            rest = functools.reduce(lambda text, ours: text.replace(ours, " "), OURS, source)
            found = [delimiter for delimiter in DELIMITERS if delimiter in rest]
            if found:
                raise FailedHookException(
                    f"Nothing was generated. An answer contains {' and '.join(found)}, which "
                    "would be run as a template: leave it out."
                )
            if source == SERVICE.name:
                return source + "<<'' if cookiecutter | checked>>"
        return source


def checked(answers: Mapping[str, object]) -> str:
    """Stop cookiecutter, before it writes anything, if an answer cannot be used.

    Called when all questions are answered, and when the folder of the service is about to be
    created, which is the first time for answers that are replayed from a file.
    """
    found = mistakes(answers)
    if found:
        raise FailedHookException("\n  - ".join(["Nothing was generated.", *found]))
    return "yes"


def source(answers: Mapping[str, object]) -> dict[str, str | None]:
    """Return the template's location and its commit, for `.cookiecutter.json`.

    The location is the absolute path of a local folder, the URL of what cookiecutter cloned
    (without a password or a token), or else as it was given. The commit is null where the template
    is no git repository of its own, or has changes that are not committed.
    """
    location = str(answers.get("_template", ""))
    if "_repo_dir" not in answers:  # cruft, which has a clone of its own
        commit = answers.get("_commit")
        return {
            "template": _without_password(location),
            "commit": str(commit) if commit else None,
        }
    folder = SERVICE.parent.resolve()
    top = _git(folder, "rev-parse", "--show-toplevel")
    is_repository = top is not None and Path(top).resolve() == folder
    if answers["_repo_dir"] == location:
        location = str(folder)
    elif is_repository:
        location = _git(folder, "remote", "get-url", "origin") or location
    is_clean = is_repository and _git(folder, "status", "--porcelain") == ""
    return {
        "template": _without_password(location),
        "commit": _git(folder, "rev-parse", "HEAD") if is_clean else None,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git wrote, None if it failed or is not installed."""
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


def _without_password(location: str) -> str:
    """Return a location without the password in it; one of HTTP also without the user."""
    # A slash in a password is wrong, and what follows the colon is no port.
    user = r"[^/?#]*@|[^/?#@:\[]*:(?!\d*([/?#]|$)).*@"
    kept = re.sub(rf"(?i)(?<=\bhttp://)({user})|(?<=\bhttps://)({user})", "", location, count=1)
    return re.sub(r"(?<=://)[^/@]*:[^/]*@", "", kept, count=1)


def mistakes(answers: Mapping[str, object]) -> list[str]:
    """Say of each answer that cannot be used what can be, in one sentence.

    Answers that are missing are not judged: of a file that is replayed, cookiecutter first shows
    those that the file leaves out.
    """
    found = []
    for question, judge in JUDGES.items():
        if question not in answers:
            continue
        answer = answers[question]
        # YAML reads yes, no, on, off and numbers as something else.
        verdict = judge(answer) if isinstance(answer, str) else "must be text, in quotes in YAML"
        if verdict:
            found.append(f"{question} {verdict}; it is {answer!r}.")
    return found


def _service_name(answer: str) -> str | None:
    if not _is_name(answer, "[a-z][a-z0-9]*(-[a-z0-9]+)*"):
        return (
            "must be lower-case letters, digits and single hyphens between them, a letter first, "
            f"{LONGEST_NAME} characters at most"
        )
    if answer in LIBRARIES:
        return "must not be the name of a library that the service uses"
    return None


def _package_name(answer: str) -> str | None:
    if not _is_name(answer, "[a-z][a-z0-9_]*"):
        return (
            "must be lower-case letters, digits and underscores, a letter first, "
            f"{LONGEST_NAME} characters at most"
        )
    if keyword.iskeyword(answer) or keyword.issoftkeyword(answer) or hasattr(builtins, answer):
        return "must not be a word that Python knows"
    if answer in sys.stdlib_module_names:
        return "must not hide a module of Python's own library"
    if answer in TAKEN:
        return "must not be the name of another folder or module of the service"
    if answer in OTHERWISE_IMPORTED or answer.replace("_", "-") in LIBRARIES:
        return "must not hide a library that the service uses"
    return None


def _description(answer: str) -> str | None:
    if not _is_line(answer, ".,:;!?'’()/+&@_–—-"):
        return (
            "must be one line of letters, digits, single spaces and . , : ; ! ? ' ( ) / + & @ _ -, "
            f"a letter or digit first, {LONGEST_LINE} characters at most"
        )
    return None


def _author(answer: str) -> str | None:
    name = re.sub(r" <[\w+-]+(\.[\w+-]+)*@[\w-]+(\.[\w-]+)+>\Z", "", answer, flags=re.ASCII)
    if not _is_line(name, ".,'’()&–-") or _columns(answer) > LONGEST_LINE:
        return (
            "must be a name of letters, digits, single spaces and . , ' ( ) & -, a letter or digit "
            f"first, alone or followed by <mail@address>, {LONGEST_LINE} characters at most"
        )
    return None


def _yes_or_no(answer: str) -> str | None:
    return None if answer in ("yes", "no") else "must be yes or no"


JUDGES: dict[str, Callable[[str], str | None]] = {
    "service_name": _service_name,
    "package_name": _package_name,
    "description": _description,
    "author": _author,
    **dict.fromkeys(FEATURES, _yes_or_no),
}


def _is_name(text: str, pattern: str) -> bool:
    return len(text) <= LONGEST_NAME and re.fullmatch(pattern, text, re.ASCII) is not None


def _is_line(text: str, punctuation: str) -> bool:
    """Whether nothing in `text` means anything in TOML, JSON, YAML, Python, make or a shell.

    All of them as the template uses them: between double quotes, or not at all.
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
    """Count what `text` takes on a screen, where a Chinese character is as wide as two letters."""
    return sum(2 if unicodedata.east_asian_width(letter) in "FW" else 1 for letter in text)
