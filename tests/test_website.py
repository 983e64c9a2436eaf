"""The site of the documentation: what it is built from, that it is complete, and its links."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import pytest
import yaml
from playwright.sync_api import Browser, sync_playwright
from playwright.sync_api import Page as Tab

from benchmarks.kept import PAGES
from website import links, llms, sources, synonyms
from website.navigation import HOME, NAME, SECTIONS, SUMMARY, Page, pages, title, unlisted
from website.navigation import sources as files

from tests.baked import RAW, ROOT, BakedProject, features
from tests.programs import require
from tests.questions import PEERS, READERS, SINGLE
from tests.test_read_me import READ_ME

BUILD = [sys.executable, "-m", "website.build"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [*BUILD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return folder


def test_every_page_of_template_and_service_is_on_the_site() -> None:
    assert unlisted() == []
    names = [page.name for page in pages()]
    assert len(names) == len(set(names))


GENERATED = (
    "| variable | default, values |",
    "| word | meaning | for example |",
    "| messages a day |",
    *("| reason of a dead letter |", "| reason to wait |", "| reason | state |"),
)
"""How tables begin that a program writes, or compares with the code."""
EXPLAINING = ("| contestant | description |", "| measure | comparison |")
"""How those tables begin of the pages of measures that their tool does not write."""


def words(page: Path) -> int:
    """Return how many words a page has, without the tables that a program writes."""
    blocks = re.split(r"\n\n+", page.read_text("utf-8"))
    kept = (
        one
        for one in blocks
        if not one.startswith(GENERATED)
        and (page not in PAGES or not one.startswith("|") or one.startswith(EXPLAINING))
    )
    return sum(bool(re.search(r"\w", word)) for one in kept for word in one.split())


def test_the_pages_are_short() -> None:
    pages = [*ROOT.glob("docs/*.md"), *RAW.glob("docs/*.md")]
    counts = {page.name: words(page) for page in pages}
    assert sum(counts.values()) <= 30_000
    assert {name: count for name, count in counts.items() if count > 1_200} == {}


def test_words_of_readers_belong_to_pages() -> None:
    assert set(synonyms.WORDS) <= {page.name for page in pages()}


def linkable(page: str) -> set[str]:
    """Return the names of the pages to which a page can link: in every service that has it."""
    everywhere = {Path(source).name for source in files()} - {"README.md", "decisions"}
    if not page.startswith(f"{RAW.name}/"):
        return everywhere
    of_services = {path.name for path in RAW.glob("docs/*.md")}
    if not page.startswith(f"{RAW.name}/docs/"):
        return of_services  # under the conditions of templates
    pages = (
        {Path(path).name for path in paths if path.endswith(".md")} for paths in features().values()
    )
    return of_services - {name for group in pages if Path(page).name not in group for name in group}


def backticked(text: str, names: set[str]) -> set[str]:
    """Return the pages that stand between backticks and lead nowhere."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\[[^]]*\]\([^)]+\)", "", prose)
    return {one for one in re.findall(r"`([\w./<>-]+\.md)`", prose) if Path(one).name in names}


def test_a_path_that_is_no_link_is_found() -> None:
    text = "`replay.md`, [`codecs.md`](codecs.md), `docs/replay.md`, `src/README.md`, `outside.md`."
    of_service = f"{RAW.name}/docs/"
    assert backticked(text, linkable(f"{of_service}replay.md")) == {"replay.md", "docs/replay.md"}
    assert "outside.md" in backticked(text, linkable(f"{RAW.name}/README.md"))
    assert linkable(f"{of_service}archive.md") - linkable(f"{of_service}replay.md") == {
        *("archive.md", "claims.md")
    }


@pytest.mark.parametrize(
    "page",
    [
        *files(),
        "AGENTS.md",
        f"{RAW.name}/README.md",
        f"{RAW.name}/AGENTS.md",
        f"{RAW.name}/SKILL.md",
    ],
)
def test_a_page_that_names_another_one_links_to_it(page: str) -> None:
    if (ROOT / page).is_file():
        assert backticked((ROOT / page).read_text("utf-8"), linkable(page)) == set()


@pytest.mark.full
@pytest.mark.slow
def test_every_page_is_in_the_navigation_with_its_title(site: Path) -> None:
    home = (site / f"{HOME}.html").read_text("utf-8")
    for section, listed in SECTIONS.items():
        assert re.search(rf"<p class=\"caption\"[^>]*><span[^>]*>{section}</span>", home)
        for page in listed:
            assert (site / f"{page.name}.html").is_file()
    version = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
    assert f"<title>{NAME} {version}</title>" in home


@pytest.mark.full
@pytest.mark.slow
def test_every_page_says_in_its_head_what_it_is_about(site: Path) -> None:
    subjects = {HOME: SUMMARY} | {page.name: f"{NAME}: {page.subject}" for page in pages()}
    for name, subject in subjects.items():
        html = (site / f"{name}.html").read_text("utf-8")
        [found] = re.findall(r'<meta name="description" content="([^"]*)">', html)
        assert unescape(found) == subject.replace("`", "")
        [icon] = re.findall(r'<link rel="shortcut icon" href="([^"]+)">', html)
        assert (site / name).parent.joinpath(icon).resolve().suffix == ".svg"


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium."""
    with sync_playwright() as driver:
        one = driver.chromium.launch(
            executable_path=str(require("chromium")), args=["--no-sandbox"]
        )
        yield one
        one.close()


def overflows(tab: Tab) -> bool:
    """Whether a page can be moved sideways, also inside of the frame around its text."""
    wide = "one => one !== null && one.scrollWidth > one.clientWidth"
    frames = '[document.documentElement, document.querySelector(".content")]'
    return bool(tab.evaluate(f"{frames}.some({wide})"))


CUT = """() => [...document.querySelectorAll("article .table-wrapper, article pre")]
  .filter(one => one.scrollWidth > one.clientWidth && !one.closest(".highlight-text"))
  .map(one => one.innerText.slice(0, 40))"""
"""The beginnings of tables and code that scroll."""


@pytest.mark.full
@pytest.mark.slow
def test_a_wide_screen_shows_tables_and_code_whole(site: Path) -> None:
    with browser() as chromium:
        tab = chromium.new_page(viewport={"width": 1_440, "height": 900})
        cut = {}
        for page in sorted(site.rglob("*.html")):
            tab.goto(page.as_uri())
            if found := tab.evaluate(CUT):
                cut[page.relative_to(site).as_posix()] = found
        tab.goto((site / "metrics.html").as_uri())
        tab.evaluate("document.querySelector('article td').style.minWidth = '1000px'")
        finds_what_is_cut = tab.evaluate(CUT)
    assert cut == {}
    assert finds_what_is_cut


@pytest.mark.full
@pytest.mark.slow
def test_a_button_copies_code_and_what_is_printed_has_none(site: Path) -> None:
    [code] = re.findall(r"^```sh\n(.*?)\n```$", READ_ME, re.DOTALL | re.MULTILINE)
    with browser() as chromium:
        allowed = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
        tab = allowed.new_page()
        tab.goto((site / f"{HOME}.html").as_uri())
        button = tab.locator(".highlight-sh button.copy")
        button.click()
        tab.get_by_role("button", name="Copied").wait_for()
        copied = tab.evaluate("navigator.clipboard.readText()")
        tab.goto((site / "commands.html").as_uri())
        buttons = tab.locator("button.copy").count()
        printed = tab.locator(".highlight-text").count()
        of_printed = tab.locator(".highlight-text button").count()
    assert copied == code
    assert buttons > 10
    assert printed > 10
    assert of_printed == 0


def test_the_navigation_has_the_repository_if_its_url_is_given(tmp_path: Path) -> None:
    url = "https://example.org/onceward"
    for given in (None, url):
        sources.write(tmp_path, given)
        assert (url in (tmp_path / f"{HOME}.md").read_text("utf-8")) == bool(given)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1_440])
def test_every_page_fits_the_screen_and_loads_nothing_from_elsewhere(
    site: Path, width: int
) -> None:
    asked: list[str] = []
    with browser() as chromium:
        tab = chromium.new_page(viewport={"width": width, "height": 900})
        tab.on("request", lambda request: asked.append(request.url))
        wide = []
        for page in sorted(site.rglob("*.html")):
            tab.goto(page.as_uri())
            if overflows(tab):
                wide.append(page.relative_to(site).as_posix())
        tab.evaluate(f"document.querySelector('article h1').style.width = '{2 * width}px'")
        finds_what_is_wide = overflows(tab)
    assert wide == []
    assert finds_what_is_wide
    assert len(asked) > 2 * len(list(pages()))
    assert [url for url in asked if not url.startswith((f"{site.as_uri()}/", "data:"))] == []


FOUND = "[...document.querySelectorAll('ul.search li > a')].map(one => one.getAttribute('href'))"


def found(tab: Tab, site: Path, question: str) -> list[str]:
    """Return the pages of the first three results of the search, and their places."""
    tab.goto(f"{(site / 'search.html').as_uri()}?{urlencode({'q': question})}")
    tab.wait_for_function(f"{FOUND}.length > 2 || Search.status?.innerText")
    return [str(one).replace(".html", "") for one in tab.evaluate(FOUND)[:3]]


@pytest.mark.full
@pytest.mark.slow
def test_the_search_has_the_page_that_answers_among_its_first_three_results(site: Path) -> None:
    questions = READERS | SINGLE | {question: page for question, (page, _) in PEERS.items()}
    assert len(questions) == len(READERS) + len(SINGLE) + len(PEERS)
    with browser() as chromium:
        tab = chromium.new_page()
        missed = {}
        for question, page in questions.items():
            results = found(tab, site, question)
            if page not in [one.partition("#")[0] for one in results]:
                missed[f"{question}: {page}"] = results
        nothing = found(tab, site, "xyzzy")
    assert missed == {}
    assert nothing == []


BRIGHTNESS = """async picture => {
  const image = await createImageBitmap(await (await fetch(picture)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const pixels = canvas.getImageData(0, 0, image.width, image.height).data;
  return pixels.reduce((sum, value, place) => sum + (place % 4 < 3 ? value : 0), 0)
    / (pixels.length / 4 * 3 * 255);
}"""
"""How bright a picture is, between 0 and 1."""
FAINT = """() => {
  const linear = part => part <= 10 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4;
  const luminance = one => {
    const [r, g, b] = getComputedStyle(one).fill.match(/[\\d.]+/g).map(Number).map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  return [...document.querySelectorAll("text, tspan")].filter(one => {
    if (one.querySelector("tspan") || getComputedStyle(one).visibility === "hidden") return false;
    const {x, y, width, height} = one.getBoundingClientRect();
    const behind = document.elementsFromPoint(x + width / 2, y + height / 2)
      .find(each => each.matches("rect, circle") && getComputedStyle(each).fill !== "none");
    if (!behind) return false;  // what is below the window
    const [dark, light] = [luminance(one), luminance(behind)].sort((a, b) => a - b);
    return (light + .05) / (dark + .05) < 4.5;
  }).map(one => one.textContent);
}"""
"""Texts of an SVG whose contrast is less than WCAG 2.2 asks for, 1.4.3."""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("by", ["system", "button"])
def test_every_picture_is_dark_on_a_dark_page(site: Path, by: str) -> None:
    bright: dict[str | None, float] = {}
    shown = 0
    with browser() as chromium:
        tab = chromium.new_page(
            viewport={"width": 1_440, "height": 900},
            color_scheme="dark" if by == "system" else "light",
        )
        if by == "button":
            tab.add_init_script("localStorage.setItem('theme', 'dark')")
        judge = chromium.new_page()
        for page in sorted(site.rglob("*.html")):
            if "<img" not in page.read_text("utf-8"):
                continue
            tab.goto(page.as_uri())
            for picture in tab.locator("article img:visible").all():
                shot = base64.b64encode(picture.screenshot(animations="disabled")).decode()
                brightness = judge.evaluate(BRIGHTNESS, f"data:image/png;base64,{shot}")
                shown += 1
                if brightness > 0.5:
                    bright[picture.get_attribute("src")] = brightness
    assert bright == {}
    assert shown > 8


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_texts_of_drawn_pictures_are_readable(scheme: str) -> None:
    pictures = [*RAW.glob("docs/*.svg"), *(ROOT / "docs").rglob("*.svg")]
    assert len(pictures) > 5
    with browser() as chromium:
        tab = chromium.new_page(
            viewport={"width": 1_440, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        faint = {}
        for picture in pictures:
            tab.goto(picture.as_uri())
            if texts := tab.evaluate(FAINT):
                faint[picture.name] = texts
    assert faint == {}


@pytest.mark.full
@pytest.mark.slow
def test_language_models_get_a_list_of_all_pages_and_their_markdown(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    assert text.startswith(f"# {NAME}\n\n> ")
    listed = re.findall(r"^- \[(.+?)\]\((\S+)\)(?:: .+)?$", text, re.MULTILINE)
    assert [name for _, name in listed] == [f"{page.name}.md" for page in pages()]
    for heading, name in listed:
        assert title((site / name).read_text("utf-8")) == heading


def text_of(site: Path, name: str) -> str:
    """Return the generated Markdown of a page."""
    return (site / f"{name}.md").read_text("utf-8")


@pytest.mark.full
@pytest.mark.slow
def test_the_reference_has_every_metric_that_alerts_dashboard_and_guide_name(site: Path) -> None:
    page = text_of(site, "metrics")
    rows = re.findall(r"^\| `(\w+)`<br>`[\w.]+` \|.*\| (.*) \| (.*) \|$", page, re.MULTILINE)
    known = {name for name, _, meaning in rows if meaning}
    assert len(known) == len(rows)
    alerts = yaml.safe_load((RAW / "deploy/prometheus/alerts.yaml").read_text("utf-8"))
    linked = {one for _, of, _ in rows for one in re.findall(r"\[(\w+)\]\(runbook", of)}
    assert linked == {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
    used = json.dumps(alerts) + (RAW / "deploy/grafana/dashboard.json").read_text("utf-8")
    used += (RAW / "docs/monitoring.md").read_text("utf-8")
    named = set(re.findall(r"\bpipeline_[a-z_]+[a-z]\b", used))
    metrics = {re.sub("_(bucket|sum|count)$", "", name) for name in named}
    assert len(known) > 25
    attributes = {f"pipeline_{one}" for one in ("consumer", "kind", "mode", "outcome", "subject")}
    assert metrics - known == attributes


@pytest.mark.full
@pytest.mark.slow
def test_the_reference_has_every_command_and_setting(site: Path) -> None:
    headings = set(re.findall(r"^#+ `(service .+)`$", text_of(site, "commands"), re.MULTILINE))
    assert {"service status", "service dead events redrive", "service registry check"} <= headings
    settings = set(re.findall(r"^\| `(PIPELINE_\w+)` \|", text_of(site, "settings"), re.MULTILINE))
    guides = "".join(page.read_text("utf-8") for page in RAW.glob("docs/*.md"))
    assert set(re.findall(r"^\| `(PIPELINE_\w+)` \|", guides, re.MULTILINE)) <= settings


@pytest.mark.full
@pytest.mark.slow
def test_the_reference_describes_what_users_call(site: Path) -> None:
    for page, place in (
        ("service", "onceward.Handlers.on"),
        ("service", "onceward.Transaction.publish"),
        ("service", "onceward.Service"),
        ("rows", "onceward.Aggregate.by"),
        ("writer", "onceward.Writer.write"),
        ("errors", "onceward.Conflict"),
        ("errors", "onceward.Unpublishable"),
        ("testing", "onceward.testing.Harness.handle"),
        ("optional", "onceward.effects.Effects.on"),
    ):
        assert f'id="{place}"' in (site / "api" / f"{page}.html").read_text("utf-8"), place
    errors = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text_of(site, "api/errors"), re.MULTILINE)
    assert {"BreakerOpen", "KeyReused", "NotSent", "Unframed"} <= {name for name, _ in errors}
    assert all(meaning for _, meaning in errors)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "is_built"),
    [
        ("[x](other.md#a-place)", True),
        ("[x](other.md#no-place)", False),
        ("```{eval-rst}\n.. autoclass:: pathlib.NoPath\n```", False),
    ],
    ids=["right", "no place", "no class"],
)
def test_a_warning_of_sphinx_is_an_error(tmp_path: Path, text: str, is_built: bool) -> None:
    source = tmp_path / "pages"
    source.mkdir()
    tree = "```{toctree}\nother\n```"
    (source / "index.md").write_text(f"# Home\n\n{text}\n\n{tree}\n", "utf-8")
    (source / "other.md").write_text("# Other\n\n## A place\n\nHere.\n", "utf-8")
    rendering = (
        "import sys; from pathlib import Path; from website.build import render;"
        " sys.exit(not render(*map(Path, sys.argv[1:])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", rendering, source, tmp_path / "site", tmp_path / "doctrees"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == is_built, done.stderr


def test_a_link_that_leads_to_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(
        "# A\n\n[b](b.md), [`x(1)`](nowhere.md#x), ![p](p.svg) `[c](c.md)` [d](<<e>>.md)\n", "utf-8"
    )
    (tmp_path / "docs" / "p.svg").write_text("<svg/>", "utf-8")
    known = {"README.md": HOME, "docs/a.md": "deep/a", "docs/b.md": "b"}
    (tmp_path / "README.md").write_text(
        '# H\n\n[a](docs/a.md#x)\n<img src="docs/p.svg">\n', "utf-8"
    )
    (tmp_path / "docs" / "b.md").write_text("# B\n", "utf-8")
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "sources", lambda: known)

    with pytest.raises(sources.Broken) as broken:
        sources.write(tmp_path / "pages")

    assert str(broken.value).splitlines() == [
        "docs/a.md: <<e>>.md is no link in Markdown: write ./ before it",
        "docs/a.md: nowhere.md#x is no page of the site, and no file",
    ]
    written = (tmp_path / "pages" / "deep" / "a.md").read_text("utf-8")
    assert "[b](../b.md)" in written
    assert "![p](../files/docs/p.svg) `[c](c.md)`" in written
    home = (tmp_path / "pages" / f"{HOME}.md").read_text("utf-8")
    assert "[a](deep/a.md#x)" in home
    assert '<img src="files/docs/p.svg">' in home


def test_links_of_the_finished_site_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there"></a><a href="b.html#gone"></a><img src="none.png">'
        '<a href="https://example.org/x"></a><a href="#here"></a><p id="here">'
        '<script src="https://example.org/x.js"></script>',
        "utf-8",
    )
    (tmp_path / "b.html").write_text('<p id="there">', "utf-8")

    assert list(links.broken(tmp_path)) == [
        "a.html: https://example.org/x.js is loaded from elsewhere",
        "a.html: b.html#gone has no such place",
        "a.html: none.png is no file",
    ]


def test_the_list_for_language_models_has_a_subject_for_each_page(tmp_path: Path) -> None:
    assert all(page.subject for page in pages())
    for name in (HOME, *(page.name for page in pages())):
        (tmp_path / f"pages/{name}.md").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"pages/{name}.md").write_text(f"# {name}!\n", "utf-8")
        (tmp_path / f"site/{name}.md").parent.mkdir(parents=True, exist_ok=True)

    llms.write(tmp_path / "pages", tmp_path / "site")

    text = (tmp_path / "site" / "llms.txt").read_text("utf-8")
    assert "- [tutorial!](tutorial.md): ten minutes" in text
    assert isinstance(next(pages()), Page)


AGENTS = re.compile(r"`([\w./{}<>-]+)`")


def check_agents(text: str, folder: Path, make: set[str]) -> None:
    """Check that the files and the targets of make that a text names are there."""
    commands = set(re.findall(r"`make ([a-z -]+)`", text))
    assert {name for command in commands for name in command.split()} <= make
    files = [one for one in AGENTS.findall(text) if re.search(r"/|\.(py|json|md)$", one)]
    assert len(files) > 5
    for file in files:
        assert list(folder.glob(f"**/{file.strip('/')}")) or (folder / file).exists(), file


def targets(folder: Path) -> set[str]:
    """Return the targets of a Makefile."""
    return set(re.findall(r"^([a-z-]+):", (folder / "Makefile").read_text("utf-8"), re.MULTILINE))


def test_what_agents_are_told_of_the_template_is_true() -> None:
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    check_agents(text.replace("`requirements*.in`", ""), ROOT, targets(ROOT))
    (test,) = re.findall(r"-m pytest (\S+)", text)
    assert (RAW / test).is_file()


def test_the_commands_of_the_skill_of_a_service_exist(default_project: BakedProject) -> None:
    text = default_project.read("SKILL.md")
    front = re.match(r"---\nname: (.+)\ndescription: (.+)\n---\n", text)
    assert front is not None
    assert front[1] == "parcel-tracker"
    assert len(front[2]) <= 1024

    commands = "\n".join(re.findall(r"(?s)```sh\n(.*?)```", text)).splitlines()
    assert {one.split()[1] for one in commands if one.startswith("make ")} <= targets(
        default_project.path
    )
    files = {file for one in commands for file in re.findall(r"(?:tests|dev)/[\w./]+", one)}
    assert len(files) > 2
    assert all((default_project.path / file).exists() for file in files)
    of_alembic = [one for one in commands if "alembic" in one]
    assert of_alembic
    assert all(one in default_project.read("README.md") for one in of_alembic)


def test_what_agents_are_told_of_a_service_is_true(default_project: BakedProject) -> None:
    text = default_project.read("AGENTS.md")
    check_agents(
        text.replace("`tables.py`", ""), default_project.path, targets(default_project.path)
    )
    assert "make schema-check" in text
    for name in ("advance",):
        assert f"def {name}(" in default_project.read("src/onceward/testing/harness.py")
