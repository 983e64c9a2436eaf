"""The contracts of a generated service, by AsyncAPI's own tools and by its own check."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from tests.baked import RAW, BakedProject, Template
from tests.programs import node_packages, require

PARSE = """
import { readFileSync } from "fs";
import { createRequire } from "module";
const { Parser } = createRequire(process.argv[2] + "/")("@asyncapi/parser");
const { document, diagnostics } = await new Parser().parse(readFileSync(0, "utf8"));
console.log(JSON.stringify({
  diagnostics: diagnostics.map(one => [one.severity, one.code, one.message, one.path.join(".")]),
  operations: document?.allOperations().all().map(one => [one.action(), one.id()]) ?? [],
  messages: document?.allMessages().all().map(one => one.name()) ?? [],
}));
"""
LEAST_WORRYING = 2
"""The severity of hints, such as that there is a later version of AsyncAPI."""
SHOTS = os.environ.get("PAGE_SHOTS")
"""A folder for screenshots, for who wants to look."""
EVERYTHING = """
from onceward.contracts.asyncapi import described
from onceward.contracts.export import written
from tests.onceward.contracts.test_export import EVENTS, shop
from onceward.contracts import export
export.declared_events = lambda: EVENTS
print(written(described(shop())))
"""


def everything() -> str:
    """Return the document of a service whose events have all kinds of fields."""
    paths = (RAW / "src", RAW / "dev", RAW)
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def parsed(document: str, folder: Path) -> dict[str, list[list[str]]]:
    """Return what AsyncAPI's parser says of a document, and finds in it."""
    packages = node_packages()
    script = folder / "parse.mjs"
    script.write_text(PARSE, "utf-8")
    done = subprocess.run(
        ["node", script, packages], input=document, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, list[list[str]]] = json.loads(done.stdout)
    return found


@pytest.mark.full
def test_asyncapis_parser_has_no_complaint(default_project: BakedProject, tmp_path: Path) -> None:
    found = parsed(default_project.read("contracts/asyncapi.json"), tmp_path)
    assert [one for one in found["diagnostics"] if int(one[0]) < LEAST_WORRYING] == []
    assert found["operations"] == [
        ["receive", "receive.record-scan.scans.scan.recorded.v1"],
        ["send", "send.parcel-events"],
    ]
    assert {*map(str, found["messages"])} == {
        *("parcel.delayed.v1", "parcel.moved.v1", "scan.recorded.v1")
    }


@pytest.mark.full
def test_asyncapis_parser_reads_all_kinds_of_fields_and_would_complain(tmp_path: Path) -> None:
    document = everything()
    found = parsed(document, tmp_path)
    assert [one for one in found["diagnostics"] if int(one[0]) < LEAST_WORRYING] == []
    broken = json.loads(document)
    del broken["info"]["version"]
    message = broken["components"]["messages"]["orders.ordered.v2"]
    message["examples"][0]["payload"]["lines"] = "none"
    codes = {one[1] for one in parsed(json.dumps(broken), tmp_path)["diagnostics"]}
    assert len(codes - {"asyncapi-latest-version"}) >= 1, codes


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """Open a page that shows AsyncAPI documents, with the libraries that it needs beside it."""
    component = node_packages() / "@asyncapi" / "react-component"
    for name in ("browser/standalone/index.js", "styles/default.min.css"):
        shutil.copy(component / name, tmp_path)
    (tmp_path / "page.html").write_text(
        '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="default.min.css">'
        '<div id="page"></div><script src="index.js"></script>',
        "utf-8",
    )
    mistakes: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=str(require("chromium")), args=["--no-sandbox"]
        )
        one = browser.new_page(viewport={"width": 1400, "height": 900})
        one.on("console", lambda said: mistakes.append(said.text) if said.type == "error" else None)
        one.on("pageerror", lambda error: mistakes.append(str(error)))
        one.goto((tmp_path / "page.html").as_uri())
        yield one
        browser.close()
    assert mistakes == []


@pytest.mark.full
def test_the_document_is_a_page_of_operations_messages_and_schemas(
    page: Page, default_project: BakedProject
) -> None:
    document = default_project.read("contracts/asyncapi.json")
    page.evaluate(
        """document => AsyncApiStandalone.render(
            {schema: document, config: {show: {errors: true}}}, window.page)""",
        document,
    )
    page.get_by_text("The consumer record-scan applies scan.recorded.v1.").first.wait_for()
    text = page.inner_text("body")
    for expected in ("parcel-tracker", "ParcelMoved", "ScanRecorded", "dead letter", "scans"):
        assert expected in text
    assert "Error" not in text
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / "asyncapi.png", full_page=True)


@pytest.mark.full
def test_a_change_is_compared_with_another_commit(template: Template, output: Path) -> None:
    project = template.bake(output)
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    said = failing(project, "schema-check")
    assert "There is no commit origin/main" in said
    [advice] = re.findall("make (schema-check BASE=.*)", said)
    assert "The events are compatible" in project.make(*advice.split())
    assert "The events are compatible" in project.make("schema-check", "BASE=HEAD")
    project.make("schema")
    assert project.run("git", "status", "--porcelain") == ""

    events = project.path / "src" / project.package / "events.py"
    changed = events.read_text("utf-8").replace(
        "    scans: int\n", "    scans: int | None = None\n"
    )
    events.write_text(changed, "utf-8")

    said = failing(project, "schema-check", "BASE=HEAD")
    assert "a consumer that has not been updated rejects events whose `scans` is null" in said
    project.make("schema")
    assert "contracts/events.json" in project.run("git", "status", "--porcelain")
    project.run("git", *who, "rm", "--quiet", "--cached", "contracts/events.json")
    project.run("git", *who, "commit", "--quiet", "--message", "Without it")
    assert "HEAD has no contracts/events.json" in project.make("schema-check", "BASE=HEAD")


def failing(project: BakedProject, *arguments: str) -> str:
    """Return what a target says that fails."""
    done = subprocess.run(
        ["make", f"VENV={sys.prefix}", *arguments],
        cwd=project.path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode != 0, done.stdout
    return done.stdout
