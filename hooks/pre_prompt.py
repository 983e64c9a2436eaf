"""Before the questions: is this cookiecutter new enough? Runs as it is, it is no template."""

import re
import sys
from importlib.metadata import version

NEEDED = (2, 6)  # the first one that lets a template choose its delimiters

found = version("cookiecutter")
if tuple(map(int, re.findall(r"\d+", found)[:2])) < NEEDED:
    sys.exit(
        f"This template needs cookiecutter {'.'.join(map(str, NEEDED))} or newer; this is {found}. "
        'Upgrade it: python3 -m pip install --upgrade "cookiecutter>=2.6"'
    )
