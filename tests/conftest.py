"""What the template's tests share."""

import runpy
from pathlib import Path

import pytest

from tests.baked import RAW, BakedProject, Template

# What spreads the tests over workers, as in the raw tree.
scheduling = runpy.run_path(str(RAW / "tests" / "servers" / "scheduling.py"))
pytest_xdist_make_scheduler = scheduling["pytest_xdist_make_scheduler"]

BAKING = {"default_project", "template"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and BAKING & set(item.fixturenames):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """The template, apart from the working folder."""
    return Template.copied_to(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def default_project(template: Template, tmp_path_factory: pytest.TempPathFactory) -> BakedProject:
    """A service generated with `--no-input`, to look at and not to touch."""
    return template.bake(tmp_path_factory.mktemp("default"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The folder a service is generated into."""
    return tmp_path / "output"
