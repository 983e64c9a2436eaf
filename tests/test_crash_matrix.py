"""The page on the crash matrix says what the engine's test does."""

import importlib.util
import re
from types import ModuleType

from tests.baked import RAW, ROOT

PAGE = (ROOT / "docs" / "crash-matrix.md").read_text("utf-8")


def listed() -> ModuleType:
    """Return the engine's list, which nothing here could import by its name."""
    path = RAW / "tests" / "onceward" / "integration" / "boundaries.py"
    spec = importlib.util.spec_from_file_location("boundaries", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_count_of_the_page_is_that_of_the_list() -> None:
    assert f"there are {len(listed().BOUNDARIES)}," in PAGE


def test_the_page_explains_the_moments_at_which_the_test_kills() -> None:
    explained = re.findall(r"^- `(\w+)`: ", PAGE, re.MULTILINE)

    assert explained == [moment.value for moment in listed().Moment]
