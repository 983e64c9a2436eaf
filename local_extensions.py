"""What stands between the answers and the template: cookiecutter loads it before it asks."""

import builtins
import functools
import keyword
import re
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

PINS = Path(__file__).parent / "<<cookiecutter.service_name>>" / "requirements" / "dev.txt"

LIBRARIES = frozenset(re.findall(r"^([a-z0-9-]+)==", PINS.read_text("utf-8"), re.MULTILINE))
"""The distributions that a generated service is run and developed with."""

OTHERWISE_IMPORTED = frozenset(
    {"dotenv", "google", "importlinter", "markdown_it", "mypyc", "opentelemetry", "pkg_resources"}
    | {"py", "pythonjsonlogger"}
)
"""Import names of theirs that do not follow from the distributions' names."""

FOLDERS = frozenset(
    {"archive", "build", "demo", "deploy", "dev", "dist", "docs", "migrations", "page"}
    | {"pipeline", "src", "test", "tests"}
)
"""Names that mean something else beside the package of a generated service."""

LONGEST_NAME = 40
"""Leaves room for what is put behind it in the 63 characters of a host or a database name."""

LONGEST_LINE = 80

OURS = (
    "<<cookiecutter.service_name>>",
    "<<cookiecutter.package_name>>",
    '<<cookiecutter.service_name.replace("-", "_")>>',
    "<<cookiecutter | checked>>",
    "<<cookiecutter | tojson>>",
)
"""All that this template has rendered outside its files: defaults, names of files, hooks."""

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

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Refuse to run what was given as an answer.

        Cookiecutter renders the answers of its command line and of the user's configuration as
        templates, and a template can run anything.
        """
        if name is None:
            rest = functools.reduce(lambda text, ours: text.replace(ours, " "), OURS, source)
            found = [delimiter for delimiter in DELIMITERS if delimiter in rest]
            if found:
                raise FailedHookException(
                    f"Nothing was generated. An answer contains {' and '.join(found)}, which "
                    "would be run as a template: leave it out."
                )
        return source


def checked(answers: Mapping[str, object]) -> str:
    """Stop cookiecutter, before it writes anything, if an answer cannot be used.

    It is asked twice. When all questions are answered, no folder stands yet; but what is replayed
    from a file is not seen before the hook `pre_gen_project`, when an empty folder does.
    """
    found = mistakes(answers) if set(JUDGES) <= set(answers) else []
    if found:
        raise FailedHookException("\n  - ".join(["Nothing was generated.", *found]))
    return "yes"


def mistakes(answers: Mapping[str, object]) -> list[str]:
    """Say of each answer that cannot be used what can be, in one sentence."""
    found = []
    for question, judge in JUDGES.items():
        answer = answers[question]
        verdict = judge(answer) if isinstance(answer, str) else "must be text"
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
    if answer in FOLDERS:
        return "must not be the name of another folder of the service"
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


JUDGES: dict[str, Callable[[str], str | None]] = {
    "service_name": _service_name,
    "package_name": _package_name,
    "description": _description,
    "author": _author,
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
