"""`python -m tests.imports`: write imports.txt, the modules that libraries of a service import.

A package of such a name would be imported in place of the module, also where that is optional and
not installed.
"""

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from local_extensions import IMPORTS, LIBRARIES

BY_NAME = {"import_module", "find_spec", "__import__", "importorskip"}
"""Functions whose first argument is the name of a module."""


def imported() -> set[str]:
    """Return the top-level modules that installed libraries of a service have, or import."""
    found = {
        name.partition(".")[0]
        for distribution in distributions()
        if re.sub(r"[-_.]+", "-", distribution.name).lower() in LIBRARIES
        for name in _modules(distribution)
    }
    return {name for name in found if re.fullmatch("[a-z][a-z0-9_]*", name)}


def _modules(distribution: Distribution) -> Iterator[str]:
    for file in distribution.files or ():
        path = Path(str(distribution.locate_file(file)))
        if path.suffix in (".py", ".pyi", ".so"):
            yield file.parts[0]
        if path.suffix in (".py", ".pyi") and path.exists():
            yield from _imports(path)


def _imports(path: Path) -> Iterator[str]:
    with warnings.catch_warnings(action="ignore"):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # a template of code, or of another version of Python
            return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(name), level=0):
                yield name
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function),
                args=[ast.Constant(value=str(name)), *_],
            ) if function in BY_NAME:
                yield name


if __name__ == "__main__":
    IMPORTS.write_text("".join(f"{name}\n" for name in sorted(imported())), "utf-8")
    print(f"{IMPORTS.name} has the modules that the libraries of {sys.prefix} import")
