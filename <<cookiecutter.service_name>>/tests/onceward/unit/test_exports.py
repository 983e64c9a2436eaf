"""What users import: the names that `onceward` exports."""

import builtins
import re
import tomllib
from collections.abc import Iterator
from inspect import getdoc, isfunction
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import onceward
import onceward.plain
from onceward import Codec

from tests.onceward import rooms

STEERING = {"LoopBlocked", "NeedsSession", "Repeat", "TooMuch"}
DECISIONS = {"_Later", "Reject"}
"""The bases of `Retry` and `Park`, and `Reject`."""


def described() -> Iterator[object]:
    """Yield what is exported, and the public members of classes."""
    for name in onceward.__all__:
        exported = getattr(onceward, name)
        yield exported
        yield from (one for name, one in vars(exported).items() if not name.startswith("_"))


def errors(base: type[Exception] = Exception) -> Iterator[type[Exception]]:
    """Yield all classes of errors that are imported."""
    for error in base.__subclasses__():
        yield error
        yield from errors(error)


def parts(hint: object) -> Iterator[object]:
    """Yield the classes in a type hint."""
    yield hint
    for one in get_args(hint):
        yield from parts(one)


def test_the_errors_that_docstrings_name_are_exported() -> None:
    of_engine = {one.__name__ for one in errors() if rooms.have(one.__module__)}
    named = {name for one in described() for name in re.findall(r"`(\w+)`", getdoc(one) or "")}
    assert {"Conflict", "Unpublishable"} <= named & of_engine
    assert named & of_engine <= {*onceward.__all__}


def test_the_types_that_a_codec_needs_are_exported() -> None:
    methods = [one for one in vars(Codec).values() if isfunction(one)]
    hints = [hint for one in methods for hint in get_type_hints(one).values()]
    types = {one for hint in hints for one in parts(hint) if isinstance(one, type)}
    names = {one.__name__ for one in types if rooms.have(one.__module__)}
    assert {"Record", "Message"} <= names <= {*onceward.__all__}
    assert {"Reason", "payload_hash"} <= {*onceward.__all__}


@pytest.mark.parametrize("name", onceward.plain.__all__)
def test_a_name_of_version_1_can_be_imported_with_a_warning(name: str) -> None:
    with pytest.warns(
        DeprecationWarning, match=f"^import {name} from onceward.plain, not from onceward$"
    ):
        assert getattr(onceward, name) is getattr(onceward.plain, name)


def test_another_name_can_not_be_imported() -> None:
    name = "Simple"
    with pytest.raises(AttributeError, match="module 'onceward' has no attribute 'Simple'"):
        getattr(onceward, name)


def test_all_errors_derive_from_one_class() -> None:
    """Those that steer the engine, and those by which a handler decides, derive from no error."""
    service = Path(onceward.__file__).parents[2]
    settings = tomllib.loads((service / "pyproject.toml").read_text("utf-8"))
    packages = settings["tool"]["ruff"]["lint"]["isort"]["sections"]["engine"]
    derived = [
        (name, getattr(builtins, base, None))
        for package in packages
        for path in (service / "src" / package).rglob("*.py")
        for name, base in re.findall(r"(?m)^class (\w+)\((\w+)\):", path.read_text("utf-8"))
    ]
    found = {
        name for name, base in derived if isinstance(base, type) and issubclass(base, BaseException)
    }
    assert found == {"OncewardError", *STEERING, *DECISIONS}
