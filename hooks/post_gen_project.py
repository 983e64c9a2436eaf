"""After the last file: take out what was not asked for, as the manifest says, and the manifest."""

import json
import shutil
from pathlib import Path

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
for cache in [*Path().rglob("__pycache__"), *Path().rglob(".*_cache")]:
    remove(cache)

print(f"\n{ANSWERS['service_name']} is there. Next: cd {Path.cwd().name} && make run")
