"""The engine as a distribution: `make wheel` builds `onceward-<version>-py3-none-any.whl`.

The same files give the same bytes on every machine: entries are sorted, not compressed, and have
one date and one mode, whatever `SOURCE_DATE_EPOCH` and umask are. So the hash of the wheel is known
where a service is generated. Standard library only, as cookiecutter runs it.

The wheel has the engine and all optional packages. An extra, named after the question, has what an
optional package requires. The SBOM (CycloneDX) is in the wheel, as PEP 770 says, and beside it. It
has the versions that the release is tested with.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile, ZipInfo

ROOT = Path(__file__).resolve().parent
SERVICE = ROOT / "<<cookiecutter.service_name>>"
NAME = "onceward"
SUMMARY = "Inbox, handlers, outbox and relay between Kafka and PostgreSQL"
DATE = (1980, 1, 1, 0, 0, 0)
"""Of all entries: the first that a ZIP file can have."""
MODE = 0o100644 << 16

README = "onceward/README.md"
"""The description, in `src`."""


@dataclass(frozen=True)
class Requirement:
    """A line of `requirements/base.in`."""

    name: str
    versions: str
    """With the extras of the distribution before them."""
    marker: str

    def line(self, extra: str | None = None) -> str:
        """Return the value of `Requires-Dist`."""
        if extra is None:
            return f"{self.name}{self.versions}" + (f"; {self.marker}" if self.marker else "")
        condition = f'extra == "{extra}"'
        marker = f"({self.marker}) and {condition}" if self.marker else condition
        return f"{self.name}{self.versions}; {marker}"


def version() -> str:
    """Return the version, which is the template's."""
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    return str(questions["_template_version"])


def extra_of(question: str) -> str:
    """Return the name of the extra of an optional package."""
    return question.replace("_", "-")


def extras() -> dict[str, list[str]]:
    """Return the names of the distributions that each optional package requires, by its question.

    Some of them are required by others, and are no requirements of the engine's own.
    """
    manifest = json.loads((SERVICE / ".features.json").read_text("utf-8"))
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    mark = "requirements: "
    return {
        name: [one.removeprefix(mark) for one in paths if one.startswith(mark)]
        for name, paths in manifest.items()
        if name in questions and name != "engine_tests"
    }


def requirements() -> dict[str, Requirement]:
    """Return what the engine and the optional packages require, by name."""
    found = {}
    for line in (SERVICE / "requirements" / "base.in").read_text("utf-8").splitlines():
        text, _, marker = line.partition(" #")[0].strip().partition("; ")
        if text and not text.startswith(("#", "-")):
            name = re.match(r"[\w.-]+", text)
            assert name is not None, line
            found[name[0]] = Requirement(name[0], text.removeprefix(name[0]), marker)
    return found


def pins() -> dict[str, str]:
    """Return the versions that the release is tested with, of all that is installed with it."""
    text = (SERVICE / "requirements" / "base.txt").read_text("utf-8")
    return dict(re.findall(r"(?m)^([a-z0-9-]+)(?:\[[^]]*\])?==([^ ;\\]+)", text))


def sources() -> Iterator[tuple[str, bytes]]:
    """Yield the paths in the wheel and the contents of all files of the packages."""
    for package in sorted((SERVICE / "src").iterdir()):
        if not (package / "__init__.py").exists() or package.name.startswith("<<"):
            continue
        yield f"{package.name}/py.typed", b""
        for path in sorted(package.rglob("*")):
            inside = path.relative_to(package).parts
            hidden = [one for one in inside if one.startswith(".") or one == "__pycache__"]
            if path.is_file() and not hidden:
                yield path.relative_to(SERVICE / "src").as_posix(), path.read_bytes()


def metadata() -> str:
    """Return the core metadata, version 2.4."""
    optional = {name for names in extras().values() for name in names}
    required = requirements()
    lines = [
        *("Metadata-Version: 2.4", f"Name: {NAME}", f"Version: {version()}"),
        *(f"Summary: {SUMMARY}", "License-Expression: MIT", "License-File: LICENSE"),
        *("Requires-Python: >=3.11", "Description-Content-Type: text/markdown"),
        *(f"Requires-Dist: {one.line()}" for one in required.values() if one.name not in optional),
    ]
    for question, names in extras().items():
        lines.append(f"Provides-Extra: {extra_of(question)}")
        known = [required[name] for name in names if name in required]
        lines += [f"Requires-Dist: {one.line(extra_of(question))}" for one in known]
    description = (SERVICE / "src" / README).read_text("utf-8")
    # Links to pages of a service lead nowhere from a wheel.
    description = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", description)
    return "\n".join([*lines, "", description])


def sbom() -> str:
    """Return what the wheel is installed with, as CycloneDX 1.6, in JSON.

    What only optional packages require is optional. There is no date, which would change it.
    """
    optional = {name for names in extras().values() for name in names}
    itself = f"pkg:pypi/{NAME}@{version()}"
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{pinned}",
            "name": name,
            "version": pinned,
            "purl": f"pkg:pypi/{name}@{pinned}",
            "scope": "optional" if name in optional else "required",
        }
        for name, pinned in sorted(pins().items())
    ]
    direct = sorted(
        f"pkg:pypi/{name}@{pinned}" for name, pinned in pins().items() if name in requirements()
    )
    digest = hashlib.sha256(json.dumps([itself, components]).encode("utf-8")).digest()
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=4)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": itself,
                "name": NAME,
                "version": version(),
                "purl": itself,
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": itself, "dependsOn": direct}],
    }
    return json.dumps(document, indent=2) + "\n"


def entries() -> Mapping[str, bytes]:
    """Return the contents of all files of the wheel, except for the record of them."""
    info = f"{NAME}-{version()}.dist-info"
    wheel = "Wheel-Version: 1.0\nGenerator: onceward\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return {
        **dict(sources()),
        f"{info}/METADATA": metadata().encode("utf-8"),
        f"{info}/WHEEL": wheel.encode("utf-8"),
        f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
        f"{info}/sboms/{NAME}.cdx.json": sbom().encode("utf-8"),
    }


def built() -> bytes:
    """Return the wheel."""
    written = entries()
    record = f"{NAME}-{version()}.dist-info/RECORD"
    lines = [
        f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in written.items()
    ]
    contents = {**written, record: "".join([*lines, f"{record},,\n"]).encode("utf-8")}
    file = BytesIO()
    with ZipFile(file, "w") as archive:
        # The metadata at the end, as the format recommends.
        for name, content in contents.items():
            entry = ZipInfo(name, DATE)
            entry.create_system = 3  # Unix, also where another system builds
            entry.external_attr = MODE
            archive.writestr(entry, content)
    return file.getvalue()


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode("ascii")


def file_name() -> str:
    """Return the name of the wheel's file."""
    return f"{NAME}-{version()}-py3-none-any.whl"


def requirement() -> dict[str, object]:
    """Return what a service that depends on the wheel has in its requirements.

    `extras` has the names by questions.
    """
    return {
        "name": NAME,
        "version": version(),
        "hash": hashlib.sha256(built()).hexdigest(),
        "extras": {name: extra_of(name) for name in extras()},
    }


def main(folder: Path) -> None:
    """Write the wheel and its SBOM into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    content = built()
    (folder / file_name()).write_bytes(content)
    (folder / f"{NAME}-{version()}.cdx.json").write_text(sbom(), "utf-8")
    print(f"{folder / file_name()} has sha256:{hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
