"""Before the first file: refuse answers that cannot be used.

Those that were typed or given on the command line were refused already, when no folder stood yet
(see `__checked` in cookiecutter.json); what is left are answers replayed from a file.
"""

import json
import sys

# In what `tojson` writes there is no ' and no line break, whatever the answers are.
ANSWERS = json.loads(r'<<cookiecutter | tojson>>')  # fmt: skip

sys.path.insert(0, ANSWERS["_repo_dir"])

from local_extensions import mistakes  # noqa: E402 (it lies in the template)

if found := mistakes(ANSWERS):
    sys.exit("\n  - ".join(["Nothing was generated.", *found]))
