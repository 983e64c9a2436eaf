"""`python long_tests.py CLONE [MOST]`: list names of tests with more than MOST (12) words.

Each line is: words TAB file:line TAB name. `test` itself is not counted.
"""

import re
import sys
from pathlib import Path

NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)

root, most = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 12
found = []
for folder in (root / "tests", root / "<<cookiecutter.service_name>>" / "tests"):
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text("utf-8")
        for match in NAME.finditer(text):
            words = len(match[1].split("_")) - 1
            if words > most:
                line = text.count("\n", 0, match.start()) + 1
                found.append((words, f"{path.relative_to(root)}:{line}", match[1]))
for words, place, name in sorted(found, key=lambda one: (-one[0], one[1])):
    print(words, place, name, sep="\t")
print(f"{len(found)} names have more than {most} words", file=sys.stderr)
