"""Providers of passwords, as settings name them."""

import os
from pathlib import Path


def from_file() -> str:
    """Return the password that the file holds now."""
    return Path(os.environ["TELLERS_PASSWORD"]).read_text()
