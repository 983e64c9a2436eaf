"""Which exceptions of the engine decide what it does next: few kinds, which its README lists."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

import onceward
from onceward.apply.failures import RolledBack
from onceward.errors import Paused, Repeat, SourceLost
from onceward.servers.record_batches import UnreadableBatch

from tests.onceward import rooms

KINDS = (Repeat, RolledBack, Paused, SourceLost, UnreadableBatch)
"""The exceptions that steer, with those that derive from them."""
OTHERS = {
    "Blocked": "reported in readiness, with its offset",
    "CredentialsUnavailable": "reported, as an outage of the brokers",
    "DataUnavailable": "a fault of the message, which counts: its data is gone",
    "HandlerFault": "a fault of the handler, which counts",
    "LoopBlocked": "ends a call that blocks the event loop, which counts as its time-out",
    "Misconfigured": "reported at the start",
    "NotOwner": "reported by retention",
    "NotSent": "an outage of the brokers",
    "Park": "a decision of the handler",
    "Reject": "a decision of the handler",
    "Retry": "a decision of the handler",
    "StoreUnavailable": "an outage of an object store or a schema registry",
    "Undecodable": "a fault of the record, which is stored",
    "Unpublishable": "reported at the start",
    "_Later": "the base of decisions",
    "_TooLarge": "the cause of an `UnreadableBatch`",
}
"""Classes that are caught by name too, and why they are none that steers."""
BESIDE = "onceward.migrations", "onceward.operators", "onceward.testing"
"""What runs beside a service, and not in its processes."""
README = Path(onceward.__path__[0]) / "README.md"
OURS = onceward.__name__ + "."


def modules() -> Iterator[ModuleType]:
    """Yield the modules that run in the processes of a service."""
    for one in pkgutil.walk_packages(onceward.__path__, OURS):
        if rooms.have(one.name) and not one.name.startswith(BESIDE):
            yield importlib.import_module(one.name)


def caught_in(module: ModuleType) -> Iterator[type[BaseException]]:
    """Yield the engine's exceptions that a module catches, or tells from others, by name."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8"))):
        match node:
            case ast.ExceptHandler(type=ast.expr() as named):
                yield from of_engine(named, module)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, named]):
                yield from of_engine(named, module)
            case ast.Call(func=ast.Name(id="suppress"), args=found):
                for named in found:
                    yield from of_engine(named, module)
            case ast.MatchClass(cls=named):
                yield from of_engine(named, module)


def of_engine(named: ast.expr, module: ModuleType) -> Iterator[type[BaseException]]:
    """Yield the engine's exceptions that an expression names."""
    match named:
        case ast.Tuple(elts=parts):
            for one in parts:
                yield from of_engine(one, module)
        case ast.BinOp(left=left, right=right):
            yield from of_engine(left, module)
            yield from of_engine(right, module)
        case ast.Name(id=name):
            found = getattr(module, name, None)
            for each in found if isinstance(found, tuple) else [found]:
                if is_own(each):
                    yield each
        case ast.Attribute(value=ast.Name(id=base), attr=name):
            attribute = getattr(getattr(module, base, None), name, None)
            if is_own(attribute):
                yield attribute


def is_own(what: object) -> TypeGuard[type[BaseException]]:
    """Return whether it is a class of exceptions of the engine."""
    if not (isinstance(what, type) and issubclass(what, BaseException)):
        return False
    return what.__module__.startswith(OURS)


def test_exceptions_caught_by_name_are_of_five_kinds_or_known_errors() -> None:
    caught = {one for module in modules() for one in caught_in(module)}
    assert {one.__name__ for one in caught if not issubclass(one, KINDS)} == OTHERS.keys()
    for kind in KINDS:
        assert any(issubclass(one, kind) for one in caught)


def test_the_kinds_are_few_and_the_readme_lists_them() -> None:
    assert len(KINDS) <= 5
    _, _, table = README.read_text("utf-8").partition("## Exceptions that steer")
    rows = re.findall(r"(?m)^\| `(\w+)` \| ((?:`\w+`(?:, )?)*) ?\|", table)
    derived = {one.__name__: {each.__name__ for each in one.__subclasses__()} for one in KINDS}
    assert [kind for kind, _ in rows] == [one.__name__ for one in KINDS]
    for kind, among in rows:
        assert {*re.findall(r"\w+", among)} <= derived[kind]
