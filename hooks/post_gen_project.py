"""After the last file: take out what was not asked for, as the manifest says, and the manifest."""

import json
import re
import shutil
from pathlib import Path

# In what `tojson` writes there is no ' and no line break.
ANSWERS = json.loads(r'<<cookiecutter | tojson>>')  # fmt: skip
MANIFEST = Path(".features.json")


def remove(path: Path) -> None:
    """Delete a file or a folder, which must be there: else the manifest is wrong."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_requirement(name: str) -> None:
    """Take a distribution out of what is required, pinned and not; it must be there."""
    for path in Path("requirements").iterdir():
        # With its hashes, which stand on further lines.
        requirement = rf"(?m)^{name}[=>](?:.*\\\n)*.*\n"
        path.write_text(re.sub(requirement, "", path.read_text("utf-8")), "utf-8")


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
