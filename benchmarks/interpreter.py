"""The Python that contestants run with: how it was built, and an environment made with it.

Profile-guided optimisation makes Python a third faster. Where an interpreter was built without it,
a figure says more of the build than of the service.
"""

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demo.processes import ProcessFailed, run

OLDEST = (3, 11)
_ASK = """
import json, os, platform, sys, sysconfig
names = "CONFIG_ARGS", "PY_CORE_CFLAGS", "PY_CORE_LDFLAGS", "CFLAGS_NODIST"
print(json.dumps({
    "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "implementation": platform.python_implementation(),
    "version": platform.python_version(),
    "flags": " ".join(str(sysconfig.get_config_var(name) or "") for name in names),
}))
"""
_PROFILED = ("--enable-optimizations", "-fprofile-use", "-fprofile-instr-use")
_LINKED = ("--with-lto", "-flto")
_DEBIAN_OPTIMISES = ("amd64", "arm64")


@dataclass(frozen=True)
class Interpreter:
    """A Python, and how it was built."""

    executable: str
    """Outside of virtual environments."""
    name: str
    """Implementation and version."""
    build: str
    """Its optimisation, and how that is known."""
    is_optimised: bool

    def __str__(self) -> str:
        return f"{self.name}, {self.build}"

    @property
    def version(self) -> tuple[int, ...]:
        """Major and minor version."""
        return tuple(map(int, self.name.split()[1].split(".")[:2]))


def examined(command: str | Path) -> Interpreter:
    """Return the interpreter that a command starts. Raises `ProcessFailed` if it starts none."""
    try:
        said = subprocess.run([command, "-c", _ASK], capture_output=True, text=True, check=True)
        found = json.loads(said.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        raise ProcessFailed(f"{command} does not start a Python") from None
    name = f"{found['implementation']} {found['version']}"
    build, is_optimised = _build(found)
    return Interpreter(found["executable"], name, build, is_optimised)


def _build(found: Mapping[str, str]) -> tuple[str, bool]:
    """Return how an interpreter was optimised, and whether a profile was used."""
    words = found["flags"].replace("'", " ").replace("=", " ").split()
    linked = any(flag in words for flag in _LINKED)
    if any(flag in words for flag in _PROFILED):
        return f"built with PGO{' and LTO' if linked else ''}", True
    if distribution := _distribution(found["executable"]):
        # Its rules build with both, and remove the flags from sysconfig.
        return f"built with PGO and LTO by {distribution}", True
    return f"not optimised: built without PGO{'' if linked else ' and LTO'}", False


def _distribution(executable: str) -> str | None:
    """Return the distribution that has packaged a file, if it optimises its Python."""
    if not _said("dpkg", "-S", executable).startswith("python3"):
        return None
    return "Debian" if _said("dpkg", "--print-architecture") in _DEBIAN_OPTIMISES else None


def _said(*words: str) -> str:
    """Return what a command writes; nothing if it fails."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def chosen(command: str | None, oldest: tuple[int, ...] = OLDEST) -> Interpreter:
    """Return the interpreter of a command; without one the first that was built with optimisation.

    If there is none, the first that is new enough. Raises `ProcessFailed` if none is.
    """
    found: list[Interpreter] = []
    for each in [command] if command else commands():
        try:
            one = examined(each)
        except ProcessFailed:
            if command:
                raise
            continue
        if one.version >= oldest and one.is_optimised:
            return one
        found += [one] if one.version >= oldest else []
    if not found:
        raise ProcessFailed(f"no Python {'.'.join(map(str, oldest))} or newer was found")
    return found[0]


def commands() -> Iterable[str]:
    """Yield ours, the system's, those that are called by their version, and those of pyenv."""
    yield sys.executable
    names = ("python3", *(f"python3.{minor}" for minor in (14, 13, 12, 11)))
    yield from ("/usr/bin/python3", *filter(None, map(shutil.which, names)))
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob("versions/3.*/bin/python")))


async def environment(
    interpreter: Interpreter, folder: Path, name: str, *words: str, log: Path
) -> Path:
    """Return the Python of an environment in a folder, into which `pip install words` was done.

    One that was made of the same before is used again. Raises `ProcessFailed`.
    """
    holds = zlib.crc32(
        "\n".join([interpreter.executable, str(interpreter), *_told(words)]).encode()
    )
    where = folder / f"{name}-{holds:08x}"
    python, complete = where / "bin" / "python", where / ".complete"
    if not complete.exists():
        shutil.rmtree(where, ignore_errors=True)
        # Debian's Python has no pip for a new environment unless python3-venv is installed.
        await run([interpreter.executable, "-m", "venv", "--without-pip", where], log=log)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        await run([*pip, "--disable-pip-version-check", *words], log=log)
        complete.touch()
    return python


def _told(words: Sequence[str]) -> Iterable[str]:
    """Yield words, and what stands in the files among them."""
    for word in words:
        path = Path(word)
        yield path.read_text("utf-8") if path.is_absolute() and path.exists() else word
