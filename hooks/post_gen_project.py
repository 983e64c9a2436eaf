"""After the last file: take out what was not asked for, as the manifest says, and the manifest."""

import json
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


for feature, paths in json.loads(MANIFEST.read_text("utf-8")).items():
    if ANSWERS[feature] == "no":
        for path in paths:
            remove(Path(path))
remove(MANIFEST)

# Baked from a folder in which somebody works.
for pattern in ("__pycache__", ".*_cache", ".hypothesis"):
    for cache in list(Path().rglob(pattern)):
        remove(cache)

print(f"\n{ANSWERS['service_name']} is there. Next: cd {Path.cwd().name} && make run")
