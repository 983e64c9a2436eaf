"""After the last file: take out what was not asked for, as the manifest says, and the manifest."""

import json
import re
import shutil
from pathlib import Path

# In what `tojson` writes there is no ' and no line break.
ANSWERS = json.loads(r'<<cookiecutter | tojson>>')  # fmt: skip
MANIFEST = Path(".features.json")


def remove(path: Path) -> None:
    """Delete a file or a folder; it must be there."""
    if not path.exists():
        raise SystemExit(f"{MANIFEST} names {path}, and there is no such file")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_requirement(name: str) -> None:
    """Take a distribution out of what is required, pinned and not; it must be there."""
    # With its hashes, which stand on further lines.
    requirement = rf"(?m)^{re.escape(name)}[=>](?:.*\\\n)*.*\n"
    found = 0
    for path in Path("requirements").iterdir():
        text, count = re.subn(requirement, "", path.read_text("utf-8"))
        path.write_text(text, "utf-8")
        found += count
    if not found:
        raise SystemExit(f"{MANIFEST} names the requirement {name}, and none of that name is there")


for feature, paths in json.loads(MANIFEST.read_text("utf-8")).items():
    if ANSWERS[feature] == "no":
        for path in paths:
            what, is_requirement, name = path.partition("requirements: ")
            if is_requirement:
                remove_requirement(name)
            else:
                remove(Path(what))
remove(MANIFEST)

# Baked from a folder in which somebody works.
for pattern in ("__pycache__", ".*_cache", ".hypothesis"):
    for cache in list(Path().rglob(pattern)):
        remove(cache)

print(f"\n{ANSWERS['service_name']} is there. Next: cd {Path.cwd().name} && make run")
