"""Durable files, for the optional packages that store objects; the engine writes no files."""

import os
from pathlib import Path


def sync(folder: Path, name: str) -> None:
    """Write a file and the folders that lead to it, from `folder` on, through to the disk."""
    path = folder / name
    for one in (path, *path.parents):
        descriptor = os.open(one, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if one == folder:
            return
