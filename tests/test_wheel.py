"""The engine as a distribution: what its wheel has, and that every build has the same bytes."""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import urlsafe_b64encode
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

import engine_wheel

from tests.baked import RAW, ROOT, Template

WHEEL = engine_wheel.file_name()
INFO = f"onceward-{engine_wheel.version()}.dist-info"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and its SBOM."""
    made: Path = tmp_path_factory.mktemp("wheel")
    engine_wheel.main(made)
    return made


@pytest.fixture(scope="module")
def metadata(folder: Path) -> Message:
    with ZipFile(folder / WHEEL) as archive:
        return message_from_bytes(archive.read(f"{INFO}/METADATA"))


@pytest.mark.slow
def test_another_clone_and_environment_build_the_same_bytes(
    folder: Path, template: Template, tmp_path: Path
) -> None:
    clone = tmp_path / "elsewhere"
    shutil.copytree(template.path, clone, symlinks=True)  # with the present time at each file
    for path in (clone / RAW.name / "src").rglob("*.py"):
        path.chmod(0o755)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    caches = clone / RAW.name / "src" / "onceward" / "__pycache__"
    caches.mkdir()
    (caches / "service.cpython-311.pyc").write_bytes(b"")
    command = (sys.executable, "engine_wheel.py", str(tmp_path / "made"))
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "TZ": "Asia/Tokyo"}

    said = subprocess.run(
        command, cwd=clone, env=environment, check=True, capture_output=True, text=True, umask=0o077
    ).stdout

    first, second = folder / WHEEL, tmp_path / "made" / WHEEL
    assert second.read_bytes() == first.read_bytes()
    assert f"sha256:{hashlib.sha256(first.read_bytes()).hexdigest()}" in said
    [sbom] = folder.glob("*.cdx.json")
    assert (tmp_path / "made" / sbom.name).read_bytes() == sbom.read_bytes()


def test_its_record_has_all_files_with_their_hashes(folder: Path) -> None:
    with ZipFile(folder / WHEEL) as archive:
        rows = [*csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines())]
        assert [name for name, *_ in rows] == archive.namelist()
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            found = urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={found}", f"{len(content)}"), name
        assert rows[-1] == [f"{INFO}/RECORD", "", ""]


def test_it_has_every_package_of_the_engine_with_types_and_no_more(folder: Path) -> None:
    packages = {
        one.name for one in (RAW / "src").iterdir() if one.is_dir() and not one.name.startswith("<")
    }
    with ZipFile(folder / WHEEL) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {*packages, INFO}
    assert {f"{package}/py.typed" for package in packages} <= {*names}
    source = {
        path.relative_to(RAW / "src").as_posix()
        for package in packages
        for path in (RAW / "src" / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if INFO not in name and "py.typed" not in name} == source


def test_an_extra_for_each_optional_package_has_what_it_requires(metadata: Message) -> None:
    questions = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))
    answers = {name for name, answer in questions.items() if answer in ("yes", "no")}
    extras = metadata.get_all("Provides-Extra")
    assert extras is not None
    assert {one.replace("-", "_") for one in extras} == answers - {"engine_tests"}
    required = metadata.get_all("Requires-Dist")
    assert required is not None
    assert {"aiokafka", "sqlalchemy"} <= {name_of(one) for one in required if "extra" not in one}
    of_page = {name_of(one) for one in required if 'extra == "operations-page"' in one}
    assert of_page == {"jinja2", "starlette", "uvicorn"}
    lines = (RAW / "requirements" / "base.in").read_text("utf-8").splitlines()
    assert {name_of(one) for one in required} == {
        name_of(one) for one in lines if one and not one.startswith("#")
    }


def name_of(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found is not None, requirement
    return found[0]


def test_the_sbom_has_the_versions_that_the_release_is_tested_with(folder: Path) -> None:
    [path] = folder.glob("*.cdx.json")
    with ZipFile(folder / WHEEL) as archive:
        assert archive.read(f"{INFO}/sboms/onceward.cdx.json") == path.read_bytes()
    sbom = json.loads(path.read_text("utf-8"))
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert sbom["metadata"]["component"]["purl"] == f"pkg:pypi/onceward@{engine_wheel.version()}"
    pins = (RAW / "requirements" / "base.txt").read_text("utf-8")
    listed = {f"{one['name']}=={one['version']}" for one in sbom["components"]}
    assert listed == {*re.findall(r"(?m)^[a-z0-9-]+==[^ ;\\]+", pins)}
    scopes = {one["name"]: one["scope"] for one in sbom["components"]}
    assert (scopes["aiokafka"], scopes["fastapi"]) == ("required", "optional")
    references = {one["bom-ref"] for one in sbom["components"]}
    [dependencies] = sbom["dependencies"]
    assert {*dependencies["dependsOn"]} <= references


@pytest.mark.slow
def test_pip_installs_it_without_the_network(folder: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    where = ("--no-index", "--no-deps", "--target", str(tmp_path))
    subprocess.run([*pip, *where, str(folder / WHEEL)], check=True)
    program = (
        "import onceward, importlib.metadata;"
        " print(onceward.__file__, importlib.metadata.version('onceward'))"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said.split() == [
        str(tmp_path / "onceward" / "__init__.py"),
        engine_wheel.version(),
    ]
