"""What lies in folders lasts: neither a file nor its name is lost with the power.

For the optional packages that keep objects; the engine itself writes no files.
"""

import os
from pathlib import Path


def sync(folder: Path, name: str) -> None:
    """Let a file survive a loss of power, and so the folders to it from `folder` on."""
    path = folder / name
    for one in (path, *path.parents):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if one == folder:
            return
