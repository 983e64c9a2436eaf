"""After the last file: take out what was not asked for, as the manifest says, and the manifest."""

import hashlib
import json
import re
import shutil
from pathlib import Path

# In what `tojson` writes there is no ' and no line break.
ANSWERS = json.loads(r'<<cookiecutter | tojson>>')  # fmt: skip
MANIFEST = Path(".features.json")
CHECKSUMS = Path(".engine.sha256")
PACKAGES = (
    *("archive", "claims", "contracts", "effects", "object_store", "operate", "page", "pipeline"),
    "schema_registry",
)
ENGINE = tuple(f"src/{package}" for package in PACKAGES)


def remove(path: Path) -> None:
    """Delete a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_requirement(name: str) -> None:
    """Take a distribution out of what is required, pinned and not; it must be there."""
    # With its hashes, which stand on further lines.
    requirement = rf"(?m)^{re.escape(name)}(?:[=>](?:.*\\\n)*.*)?\n"
    found = 0
    for path in Path("requirements").iterdir():
        text, count = re.subn(requirement, "", path.read_text("utf-8"))
        path.write_text(text, "utf-8")
        found += count
    if not found:
        raise SystemExit(f"{MANIFEST} names the requirement {name}, and none of that name is there")


# Two features may name the same: all is looked for before anything is removed.
unwanted = sorted(
    {
        each
        for feature, names in json.loads(MANIFEST.read_text("utf-8")).items()
        if ANSWERS[feature] == "no"
        for each in names
    }
)
required = [each.removeprefix("requirements: ") for each in unwanted if ": " in each]
paths = [Path(each) for each in unwanted if ": " not in each]
for path in paths:
    if not path.exists():
        raise SystemExit(f"{MANIFEST} names {path}, and there is no such file")
for name in required:
    remove_requirement(name)
for path in [*paths, MANIFEST]:
    remove(path)

# Baked from a folder in which somebody works.
for pattern in ("__pycache__", ".*_cache", ".hypothesis"):
    for cache in list(Path().rglob(pattern)):
        remove(cache)

# As `sha256sum` writes them, for `dev/engine.py`.
CHECKSUMS.write_text(
    "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.as_posix()}\n"
        for path in sorted(path for folder in ENGINE for path in Path(folder).rglob("*"))
        if path.is_file()
    ),
    "utf-8",
)

print(f"\n{ANSWERS['service_name']} is there. Next: cd {Path.cwd().name} && make run")
