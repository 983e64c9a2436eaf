"""Names of packages before version 2, which can be imported until version 3.

`renamed.json` lists them. An import by an old name gives the module that has the new name, and a
`DeprecationWarning`. A package or module of the service that has such a name takes precedence.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module, resources
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class OldNames(MetaPathFinder, Loader):
    """Finds modules by their old names."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name; None for all others."""
        top, _, rest = fullname.partition(".")
        if top not in self._names or (rest and not self._is_alias(top)):
            return None
        if not rest and self._is_elsewhere(top):
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module that has the new name."""
        top, dot, rest = spec.name.partition(".")
        new = f"{self._names[top]}{dot}{rest}"
        try:
            module = import_module(new)
        except ModuleNotFoundError as error:
            if error.name == new:
                raise ModuleNotFoundError(
                    f"No module named {spec.name!r}, which is now {new!r}", name=spec.name
                ) from None
            raise
        warnings.warn(f"the module {spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import has replaced by the old name's."""
        spec = module.__spec__
        if spec is not None and spec.name in self._specs:
            module.__spec__ = self._specs.pop(spec.name)

    def _is_alias(self, top: str) -> bool:
        return top in sys.modules and sys.modules[top].__name__ == self._names[top]

    def _is_elsewhere(self, top: str) -> bool:
        """Return whether another finder has it; a folder without modules does not count."""
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(top, None) for finder in others)
        return any(spec is not None and spec.origin is not None for spec in specs)


def install() -> None:
    """Let modules be imported by their old names."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        text = resources.files("onceward").joinpath("renamed.json").read_text("utf-8")
        # Before the finder of paths, which would load a submodule a second time.
        sys.meta_path.insert(0, OldNames(json.loads(text)))
