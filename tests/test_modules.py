"""The graph of modules that import each other, as their text has it, has no cycles."""

import ast
import re
from collections.abc import Mapping, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.baked import RAW, ROOT

FOLDERS = {
    **{path.name: path for path in sorted((RAW / "src").iterdir()) if path.is_dir()},
    **{name: ROOT / name for name in ("benchmarks", "chaos", "demo", "model", "tests", "website")},
    "dev of a service": RAW / "dev",
    "tests of a service": RAW / "tests",
}


def graph_of(folder: Path) -> dict[str, set[str]]:
    """Return which modules of a folder each of them imports, also only for a type checker."""
    files = {name_of(path, folder.parent): path for path in folder.rglob("*.py")}
    return {name: imports_of(path, name, files.keys()) for name, path in files.items()}


def name_of(path: Path, root: Path) -> str:
    """Return the name by which a module is imported."""
    *folders, name = path.relative_to(root).with_suffix("").parts
    return ".".join(folders if name == "__init__" else [*folders, name])


def imports_of(path: Path, name: str, modules: Set[str]) -> set[str]:
    """Return those of the modules that a module imports, wherever it does."""
    # A file of the raw service may name the package that is generated.
    tree = ast.parse(re.sub("<<.*?>>", "generated", path.read_text("utf-8")))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {one.name for one in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                around = package.split(".")[: 1 - level or None] if level else []
                base = ".".join([*around, *([module] if module else [])])
                of_base = {f"{base}.{one.name}" for one in names}
                # A name of a package is a module of it, or else something that it defines.
                found |= of_base & modules or {base}
    return (found & modules) - {name}


def cycle_in(graph: Mapping[str, Set[str]]) -> Sequence[str]:
    """Return a cycle of modules that import each other; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: Sequence[str] = error.args[1]
        return found
    return ()


@pytest.fixture
def circle(tmp_path: Path) -> Path:
    """Return a package of which two modules import each other, one only for a type checker."""
    folder = tmp_path / "circle"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "first.py").write_text("from . import second\n")
    (folder / "second.py").write_text(
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from .first import Name\n"
    )
    return folder


def test_a_cycle_is_found_even_through_imports_for_typing(circle: Path) -> None:
    assert {*cycle_in(graph_of(circle))} == {"circle.first", "circle.second"}


@pytest.mark.parametrize("name", FOLDERS)
def test_no_modules_import_each_other_in_a_cycle(name: str) -> None:
    graph = graph_of(FOLDERS[name])
    assert graph
    assert cycle_in(graph) == ()
