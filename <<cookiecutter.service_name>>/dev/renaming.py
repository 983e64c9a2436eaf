"""Replace names of the template's packages that a newer version has changed.

`NAMES` of that version lists them. `make update` moves the folders and replaces the names in the
service's own files before it merges. After an update by an older `dev/update.py`,
`python dev/renaming.py` replaces what still has old names.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from itertools import accumulate
from pathlib import Path

NAMES = "src/onceward/renamed.json"
"""Old and new names of packages in `src`; those of their tests, in `tests`, are alike."""

SKIPPED = (".css", ".html", ".js", ".svg")
"""Files that name no module; a template's `page.title` is a variable."""


def folder_of(module: str) -> str:
    """Return the path of a module's folder, or of its file without the suffix."""
    path = module.replace(".", "/")
    return path if path.split("/")[0] == "tests" else f"src/{path}"


def modules_in(paths: Iterable[str], names: Mapping[str, str], *, moved: bool) -> dict[str, str]:
    """Return the old and new names of the packages, and packages of tests, that a tree has.

    What it has under the old name only is the template's, unless the tree was `moved` already.
    """
    folders = _folders(paths)
    return {
        root + old: root + new
        for root in ("", "tests.")
        for old, new in names.items()
        if folder_of(root + (new if moved else old)) in folders
    }


class Renames:
    """New names for the paths and the texts of files."""

    def __init__(
        self, modules: Mapping[str, str], paths: Iterable[str], read: Callable[[str], str]
    ) -> None:
        """`modules` has a new name for each old one.

        `paths` are those of the files that the modules are in, and `read` returns the text of one:
        `pipeline.backlog` is a module only if there is one, and a table otherwise.
        """
        self._modules = modules
        self.moves = {folder_of(old): folder_of(new) for old, new in modules.items()}
        self._files = {self.path(path): path for path in paths}
        self._folders = _folders(self._files)
        self._read = read
        self._defined: dict[str, set[str]] = {}
        # The longest first: an alternative may begin with another.
        names = _any_of(modules)
        tops = _any_of(name for name in modules if "." not in name)
        self._imports = re.compile(
            r"(?m)(?P<before>(?:(?<![\w.])|(?<=\\n))from (?=[\w.]+ import\b)"
            r"|(?:^[ \t]*|[\"'`;] ?|\\n)import )"
            rf"(?P<name>(?:{names})(?:\.\w+)*)(?![\w.])"
        )
        self._calls = re.compile(
            r"(?P<before>\b(?:getLogger|set_level|at_level|find_spec|import_module|importorskip"
            rf"|files)\((?:[\w.]+, )?[\"'])(?P<name>(?:{names})(?:\.\w+)*)(?=[\"'])"
        )
        self._parts = re.compile(
            rf'"(?P<root>src|tests)"(?P<mark> / |, )"(?P<name>{tops})"(?=[\s,)\]])'
        )
        self._dotted = re.compile(rf"(?<![\w.$/{{-])(?P<name>(?:{names})(?:\.\w+)+)")
        self._paths = re.compile(rf"(?<![\w-])(?:{_any_of(self.moves)})(?![\w-])")
        self._in_source = re.compile(rf"(?<![\w./-])(?:{tops})(?:/\w+)+\.\w+")
        self._resources = re.compile(
            rf"(?<![\w./-])(?P<name>(?:{tops})(?:\.\w+)*):(?P<rest>\w+(?:/\w+)*)"
        )

    def module(self, name: str) -> str:
        """Return the new name of a module, or of something in one."""
        for old, new in self._modules.items():
            if name == old or name.startswith(f"{old}."):
                return new + name.removeprefix(old)
        return name

    def path(self, path: str) -> str:
        """Return the new path of a file or folder."""
        for old, new in self.moves.items():
            if path == old or path.startswith(f"{old}/"):
                return new + path.removeprefix(old)
        return path

    def content(self, path: str, content: bytes) -> bytes:
        """Return the content of a file with the new names; `path` is its old or new one."""
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            return content
        return self.text(path, text).encode("utf-8")

    def text(self, path: str, text: str) -> str:
        """Return the text of a file with the new names."""
        if path.endswith(SKIPPED):
            return text
        bound = {
            old
            for found in self._imports.finditer(text)
            for old in self._modules
            if found["before"].endswith("import ") and f"{found['name']}.".startswith(f"{old}.")
        }
        text = self._imports.sub(self._renamed, text)
        text = self._calls.sub(self._renamed, text)
        text = self._parts.sub(self._joined, text)
        return self._in_code(text, bound) if path.endswith(".py") else self._in_words(text)

    def _renamed(self, found: re.Match[str]) -> str:
        return found["before"] + self.module(found["name"])

    def _joined(self, found: re.Match[str]) -> str:
        path = self.path(f"{found['root']}/{found['name']}")
        return found["mark"].join(f'"{part}"' for part in path.split("/"))

    def _in_code(self, code: str, bound: set[str]) -> str:
        """Replace names in literals and comments, and those that `import` has bound."""
        starts = [0, *accumulate(map(len, StringIO(code)))]
        pieces: list[str] = []
        end, before = 0, ""
        try:
            tokens = list(tokenize.generate_tokens(StringIO(code).readline))
        except (SyntaxError, tokenize.TokenError):  # conflicts, or no Python
            return code
        for token in tokens:
            new = token.string
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                new = self._in_words(new)
            elif token.type == tokenize.NAME and new in bound and before != ".":
                new = self._modules[new]
            if new != token.string:
                start, stop = (starts[row - 1] + column for row, column in (token.start, token.end))
                pieces += [code[end:start], new]
                end = stop
            before = token.string
        return "".join([*pieces, code[end:]])

    def _in_words(self, text: str) -> str:
        """Replace what names a module that exists, or its file, in a text that is no code."""

        def renamed(found: re.Match[str]) -> str:
            name = found["name"]
            return self.module(name) if self._is_module(name) else name

        def in_source(found: re.Match[str]) -> str:
            new = self.path(f"src/{found[0]}")
            return new.removeprefix("src/") if new in self._files else found[0]

        def resource(found: re.Match[str]) -> str:
            new, rest = self.module(found["name"]), found["rest"]
            return f"{new}:{rest}" if f"{folder_of(new)}/{rest}" in self._folders else found[0]

        text = self._dotted.sub(renamed, text)
        text = self._paths.sub(lambda found: self.path(found[0]), text)
        text = self._in_source.sub(in_source, text)
        return self._resources.sub(resource, text)

    def _is_module(self, name: str) -> bool:
        """Return whether an old name is that of a module, or of something that one defines."""
        parts = self.module(name).split(".")
        for length in range(len(parts), 0, -1):
            base = folder_of(".".join(parts[:length]))
            for file in (f"{base}.py", f"{base}/__init__.py"):
                if file in self._files:
                    return length == len(parts) or parts[length] in self._definitions(file)
        return False

    def _definitions(self, file: str) -> set[str]:
        if file not in self._defined:
            try:
                tree = ast.parse(self._read(self._files[file]))
            except SyntaxError:
                tree = ast.Module([], [])
            self._defined[file] = {name for node in tree.body for name in _bound(node)}
        return self._defined[file]


def _bound(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [one.asname or one.name.partition(".")[0] for one in names]
        case ast.Assign() | ast.AnnAssign() | ast.If() | ast.Try():
            stored = (one for one in ast.walk(node) if isinstance(one, ast.Name))
            return [one.id for one in stored if isinstance(one.ctx, ast.Store)]
        case _:
            return []


def _folders(paths: Iterable[str]) -> set[str]:
    """Return all folders that files are in."""
    return {parent.as_posix() for path in paths for parent in Path(path).parents}


def _any_of(names: Iterable[str]) -> str:
    """Return a pattern for one of the names."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


def main(root: Path) -> None:
    """Replace old names in the files of a service that are in git, except for the engine's.

    Raises `SystemExit` if the service has no source of the engine.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True
    ).stdout.decode("utf-8", "surrogateescape")
    paths = [path for path in listed.split("\0") if path and (root / path).is_file()]
    if not (root / NAMES).exists():
        raise SystemExit(f"{NAMES} does not exist: update with engine=source first")
    names = json.loads((root / NAMES).read_text("utf-8"))
    modules = modules_in(paths, names, moved=True)
    renames = Renames(modules, paths, lambda path: (root / path).read_text("utf-8"))
    engine = tuple(f"{folder_of(new)}/" for new in modules.values())
    for path in paths:
        content = (root / path).read_bytes()
        new = content if path.startswith(engine) else renames.content(path, content)
        if new != content:
            (root / path).write_bytes(new)
            print(path)


if __name__ == "__main__":
    main(Path(__file__).resolve().parents[1])
