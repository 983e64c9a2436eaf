"""The operations page in a real browser: Chromium without a screen, on servers that run."""

import asyncio
import hashlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped]
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.baked import RAW
from tests.programs import require

pytestmark = [pytest.mark.full, pytest.mark.integration]

TOKEN = "a token of the tests"
PAGES = [
    *("/", "/dead", "/events", "/backlog", "/scheduled", "/stops", "/positions"),
    *("/retention", "/doctor", "/words", "/timeline?key=account+2", "/affected", "/correct"),
]
CORRECTION = "/correct?name=undo&release=1.4.2"
OF_A_RELEASE = ["/affected?release=1.4.2", CORRECTION]
SCROLLS = """
[...document.querySelectorAll(".wide")]
  .filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)
"""
"""Lists that can be seen as a whole only by moving them sideways."""
FAINT = """() => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const linear = part => part <= 10 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
  };
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), one = texts.currentNode.parentElement;
    if (!text || !one.checkVisibility()) continue;
    const [dark, light] = [numbers(getComputedStyle(one).color), behind(one)]
      .map(luminance).sort((a, b) => a - b);
    if ((light + .05) / (dark + .05) < 4.5) found.push(text);
  }
  return found;
}"""
"""Texts whose contrast is less than WCAG 2.2 asks for, 1.4.3."""
SHOTS = os.environ.get("PAGE_SHOTS")
"""A folder for screenshots, for who wants to look."""
PICTURES = {
    "operations-page.png": (
        "overview-1200-light.png",
        "84e554b9c845c3c35ab0a4423e81f6d6a06878a2deef2e58c92393880e546b1a",
    ),
    "operations-page-dark.png": (
        "overview-1200-dark.png",
        "ae74c10514cd92a8c12983a12147b7a5cfbfb00a969bcff59977fe5c32d8a5da",
    ),
    "operations-page-narrow.png": (
        "overview-360-dark.png",
        "760338291089fd65a520b18988e4d213a7eedfc40ff9216dcf7c2fe8bb9fa91c",
    ),
    "operations-page-letter.png": (
        "letter-1200-light.png",
        "281f0ece1061e790e796b41191723e3c197a097db092a8879c6e1d12257f7194",
    ),
    "operations-page-letter-dark.png": (
        "letter-1200-dark.png",
        "585946a02884b98ef71151098e5aafa2cdda1b316cf3d1460d5541ce95bd65c3",
    ),
}
"""Those of them that docs/operations-page.md shows, and their SHA-256."""
PICTURED = "b483282a602ea0f31e8ded429a84e6aa9bbae709b1702afc29a695d0e0e13d2f"
"""What the templates and styles hash to that these pictures show."""


def execute(url: str, statement: str) -> None:
    """Execute a statement on the server."""

    async def run() -> None:
        connection = await asyncpg.connect(url.replace("+asyncpg", ""))
        await connection.execute(statement)
        await connection.close()

    asyncio.run(run())


def check_layout(page: Page, name: str) -> None:
    """See that nothing is cut off or faint, and take a screenshot for who wants to look."""
    size = page.viewport_size
    assert size is not None
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
    assert page.evaluate(SCROLLS) == [], name
    assert page.evaluate(FAINT) == [], name
    if SHOTS:
        is_dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        shot = f"{name}-{size['width']}-{'dark' if is_dark else 'light'}.png"
        page.screenshot(path=Path(SHOTS) / shot)


@pytest.fixture(scope="module")
def chromium() -> str:
    """The browser's path."""
    return str(require("chromium"))


@pytest.fixture(scope="module")
def environment(chromium: str) -> Iterator[Mapping[str, str]]:
    """The variables of a bank and its page, with a database of their own."""
    server, name = os.environ["PIPELINE_DATABASE_URL"], f"page_{uuid4().hex[:12]}"
    execute(server, f"CREATE DATABASE {name}")
    yield {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (RAW / "src", RAW / "dev", RAW))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "BANK_NAME": "bank",
        "BANK_DEPOSITS": f"{name}-in",
        "BANK_BALANCES": f"{name}-out",
        "PIPELINE_DATABASE_URL": f"{server.rpartition('/')[0]}/{name}",
        "PIPELINE_PAGE_TOKEN": TOKEN,
        "PIPELINE_PAGE_INTERVAL": "1",
        "PIPELINE_HEALTH_PORT": "0",
    }
    execute(server, f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def served(environment: Mapping[str, str], log: Path, *command: str) -> Iterator[str]:
    """Run a program that serves the page, and return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=RAW,
            env={**environment, "PIPELINE_PAGE_PORT": str(port)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/login", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(log.read_text())
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        assert "Traceback" not in log.read_text()
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def address(
    environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Serve a page with something to see."""
    log = tmp_path_factory.mktemp("page") / "page.log"
    with served(environment, log, "tests.onceward.page.exhibit") as found:
        yield found


@pytest.fixture(scope="module")
def browser(chromium: str, address: str) -> Iterator[Browser]:
    """Start Chromium, after the page: beside its loop there is room for no other."""
    with sync_playwright() as driver:
        one = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield one
        one.close()


@contextmanager
def logged_in(browser: Browser, address: str) -> Iterator[Page]:
    """Log in, by the keyboard."""
    context = browser.new_context(base_url=address)
    context.set_default_timeout(60_000)
    one = context.new_page()
    mistakes: list[str] = []
    one.on("console", lambda said: mistakes.append(said.text) if said.type == "error" else None)
    one.on("pageerror", lambda error: mistakes.append(str(error)))
    one.goto("/")
    one.keyboard.type("ann")
    one.keyboard.press("Tab")
    one.keyboard.type(TOKEN)
    one.keyboard.press("Enter")
    one.get_by_role("heading", name="Overview").wait_for()
    yield one
    context.close()
    assert mistakes == []


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """Open the page as a person who is logged in sees it."""
    with logged_in(browser, address) as one:
        yield one


def test_a_person_sees_how_the_service_stands(page: Page) -> None:
    tile = page.locator("section", has=page.get_by_role("heading", name="Dead letters"))
    assert tile.locator(".figure").inner_text() in ("10", "11")
    for name, figure in (("Kafka lag", "0"), ("Outbox", "0"), ("Backlog", "0")):
        tile = page.locator("section", has=page.get_by_role("heading", name=name))
        tile.locator(".figure").filter(has_text=re.compile(f"^{figure}$")).wait_for()
    again = page.locator("section", has=page.get_by_role("heading", name="Duplicates"))
    again.locator(".note").filter(has_text=re.compile(r"^(\d{2,}|\d,\d{3}) since")).wait_for()
    page.get_by_role("cell", name=re.compile(r"^127\.0\.0\.1 ")).first.wait_for()
    page.locator("#live .bad").first.wait_for(state="detached")
    page.locator("#live h2 a").first.focus()
    held = page.evaluate("document.activeElement.href")
    before = page.locator("#live .note").last.inner_text()
    page.wait_for_function(
        "before => [...document.querySelectorAll('#live .note')].pop().innerText !== before",
        arg=before,
    )
    assert page.evaluate("document.activeElement.href") == held, "who is there stays there"


def test_a_hostile_payload_is_read_and_does_nothing(page: Page) -> None:
    page.get_by_role("link", name="Dead letters", exact=True).first.click()
    page.get_by_label("Event id").fill(
        "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
    )
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="1 dead").wait_for()
    page.locator("tbody a").click()
    assert "<script>" in page.locator("pre").first.inner_text()
    assert page.locator("img").count() == 0
    assert page.title() == "Dead letter · bank"


def test_a_dead_letter_is_redriven_by_the_keyboard(page: Page) -> None:
    page.goto("/dead?key=account+3")
    page.locator("tbody a").first.focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Redrive").wait_for()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.innerText") == "Redrive":
            break
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="Redriven: 1.").wait_for()


def test_a_dead_letter_is_edited_and_a_search_discarded(page: Page) -> None:
    page.goto("/dead?key=account+4")
    page.locator("tbody a").first.click()
    page.get_by_text("Edit and redrive a copy").click()
    payload = page.get_by_label("Payload")
    payload.fill(re.sub(r'"amount": \d+', '"amount": 100', payload.input_value()))
    page.get_by_label("Why it is changed").fill("a test")
    page.get_by_role("button", name="Redrive the copy").click()
    page.get_by_role("status").filter(has_text="Redriven: 1.").wait_for()
    page.goto("/dead?key=account+5")
    page.get_by_role("link", name="Redrive or discard all").click()
    discard_one(page, "Reason to discard them", "Discard 1")


def test_a_topic_is_paused_and_resumed(page: Page) -> None:
    page.get_by_role("link", name="Paused", exact=True).first.click()
    choices = page.get_by_label("What")
    options = choices.locator("option").all_text_contents()
    topic = next(one for one in options if one.startswith("topic "))
    choices.select_option(topic)
    page.get_by_label("Minutes").fill("5")
    page.get_by_label("Why", exact=True).fill("a test")
    page.get_by_role("button", name="Pause").click()
    row = page.get_by_role("row").filter(has_text=f"{topic} is paused")
    row.get_by_text("Resume …").click()
    for width in (360, 1_200):
        page.set_viewport_size({"width": width, "height": 660})
        check_layout(page, "paused")
    row.get_by_label("Why it may go on").fill("it is over")
    row.get_by_role("button", name="Resume it").click()
    page.get_by_text("Nothing is paused.").wait_for()


def comes(page: Page, path: str, text: str) -> None:
    """Load a page again until it has the text."""
    deadline = time.monotonic() + 120
    while True:
        page.goto(path)
        if page.get_by_text(text).count():
            return
        assert time.monotonic() < deadline, page.locator("main").inner_text()
        page.wait_for_timeout(300)


def fits(page: Page, name: str) -> None:
    """Check the layout on a narrow and on a wide screen."""
    for width in (360, 1_200):
        page.set_viewport_size({"width": width, "height": 660})
        check_layout(page, name)


def discard_one(page: Page, label: str, button: str) -> None:
    """Give the reason, in the field of this label, and discard the one that is shown."""
    page.get_by_label(label).fill("a test")
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("status").filter(has_text="Discarded: 1.").wait_for()


def pause(page: Page, what: str, fields: Mapping[str, str]) -> None:
    """Pause or throttle one of the choices; the fields are named by their labels."""
    page.goto("/stops")
    page.get_by_label("What").select_option(what)
    for label, value in fields.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Why", exact=True).fill("a test")
    with page.expect_navigation():
        page.get_by_role("button", name="Pause").click()


def resume_all(page: Page) -> None:
    """Resume all that is paused, one after the other."""
    page.goto("/stops")
    rows = page.get_by_role("row").filter(has_text="Resume …")
    while rows.count():
        rows.first.get_by_text("Resume …").click()
        rows.first.get_by_label("Why it may go on").fill("it is over")
        with page.expect_navigation():
            rows.first.get_by_role("button", name="Resume it").click()
    page.get_by_text("Nothing is paused.").wait_for()


def test_a_key_is_paused_and_a_consumer_throttled(page: Page) -> None:
    page.goto("/stops")
    options = page.get_by_label("What").locator("option").all_text_contents()
    of_topic = next(one for one in options if one.startswith("key of page_"))
    pause(page, of_topic, {"Key, if it is one": "<b>account 2</b>"})
    row = page.get_by_role("row").filter(has_text="--consumer deposit is paused")
    assert "key '<b>account 2</b>' --topic" in row.inner_text()
    pause(page, "consumer deposit", {"Messages in a second": "2.5", "Minutes": "5"})
    page.get_by_role("row").filter(has_text="consumer deposit is throttled to 2.5/s").wait_for()
    fits(page, "throttled")
    resume_all(page)


def test_groups_of_dead_letters_are_redriven_and_discarded_by_their_links(page: Page) -> None:
    def follow(name: str) -> None:
        page.goto("/dead")
        group = page.locator(".groups li").filter(has_text=name)
        group.get_by_role("link", name="redrive or discard them …").click()
        page.get_by_role("heading", name="Redrive or discard 1", exact=True).wait_for()

    follow("1 attempts used up, deposit")
    page.get_by_role("button", name="Redrive 1", exact=True).click()
    page.get_by_role("status").filter(has_text="Redriven: 1.").wait_for()
    follow("1 missing type, (none)")
    discard_one(page, "Reason to discard them", "Discard 1")


def test_dead_events_are_listed_and_discarded_individually_and_by_group(page: Page) -> None:
    page.get_by_role("link", name="Dead events", exact=True).first.click()
    page.get_by_role("status").filter(has_text="3 dead").wait_for()
    group = page.locator(".groups li").filter(has_text="1 not valid")
    group.get_by_role("link").click()
    discard_one(page, "Reason to discard them", "Discard 1")
    page.goto("/events")
    page.get_by_label("Event id").fill("c")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("status").filter(has_text="1 dead").wait_for()
    page.locator("tbody a").click()
    discard_one(page, "Reason to discard it", "Discard")
    page.goto("/events")
    page.get_by_label("State").select_option("discarded")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("status").filter(has_text="2 discarded").wait_for()


def test_a_scheduled_event_is_cancelled_and_its_neighbour_stays(page: Page) -> None:
    page.get_by_role("link", name="Scheduled", exact=True).first.click()
    row = page.get_by_role("row").filter(has_text="reminder of eve")
    row.get_by_text("Cancel …").click()
    fits(page, "cancel")
    row.get_by_label("Why it is not to be published").fill("a test")
    row.get_by_role("button", name="Cancel it").click()
    row.wait_for(state="detached")
    assert page.get_by_role("row").filter(has_text="reminder of ada").count() == 1


def test_what_a_release_has_applied_is_handed_to_a_correction_and_cancelled(page: Page) -> None:
    def preview(newer: str) -> None:
        page.get_by_label("Newer than").fill(newer)
        page.get_by_role("button", name="Preview").click()

    def begin() -> None:
        page.get_by_label("Messages in a second").fill("1000")
        page.get_by_label("Why it is corrected").fill("a test")
        with page.expect_navigation():
            page.get_by_role("button", name="Hand them to undo").click()
        comes(page, "/correct", "undo of 1.4.2: 20 handed; done")
        page.goto(CORRECTION)

    def is_shown(column: str, number: int) -> None:
        cell = page.locator(f'td[data-label="{column}"]')
        cell.filter(has_text=re.compile(f"^{number}$")).wait_for()

    comes(page, CORRECTION, "Hand them to undo")
    pause(page, "consumer undo", {})
    page.get_by_role("link", name="Affected", exact=True).first.click()
    page.get_by_label("Release").fill("1.4.2")
    page.get_by_role("button", name="Count").click()
    page.get_by_role("link", name="Correct what it has applied").click()
    preview("1m")
    page.get_by_text("Nothing of this release is left that undo takes.").wait_for()
    preview("2h")
    is_shown("To hand", 20)
    fits(page, "correction")
    begin()
    is_shown("Handed before", 20)
    page.get_by_label("Why what waits for it is cancelled").fill("a test")
    page.get_by_role("button", name="Cancel what waits").click()
    page.get_by_role("status").filter(has_text="Cancelled: 20.").wait_for()
    resume_all(page)
    page.goto(CORRECTION)
    is_shown("To hand", 20)
    begin()
    comes(page, "/backlog", "No message waits.")
    page.goto(CORRECTION)
    is_shown("To hand", 0)
    is_shown("Handed before", 20)


def test_a_message_is_sent_by_a_form_and_its_timeline_shows_that_it_is_applied(
    browser: Browser, address: str, environment: Mapping[str, str], tmp_path: Path
) -> None:
    """By a page for development, beside that of production."""
    sending, log = {**environment, "PIPELINE_PAGE_SEND": "true"}, tmp_path / "page.log"
    with (
        served(sending, log, "tests.onceward.page.app", "page") as other,
        logged_in(browser, other) as page,
    ):
        page.get_by_role("link", name="Send", exact=True).click()
        page.get_by_role("button", name="Show the form").click()
        page.get_by_label("account").fill("account <i>9</i>")
        page.get_by_label("amount").fill("9")
        page.get_by_label("failures").fill("0")
        fits(page, "send")
        page.get_by_role("button", name="Send", exact=True).click()
        sent = page.get_by_role("status")
        sent.filter(
            has_text=re.compile("Sent to page_.*/0 at offset [0-9]+, with the id")
        ).wait_for()
        fits(page, "sent")
        comes(page, sent.get_by_role("link").get_attribute("href") or "", "applied")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1_200])
def test_every_page_fits_the_screen(page: Page, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": width, "height": 660})
    page.goto("/dead")
    letter = page.locator("tbody a").last.get_attribute("href") or ""
    back = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    for path in [*PAGES, *OF_A_RELEASE, "/dead/preview", letter, "/events/1"]:
        page.goto(path)
        page.evaluate(
            "document.querySelectorAll('.edit').forEach(one => one.parentNode.open = true)"
        )
        assert (page.evaluate(back) < 100) == (scheme == "dark")
        name = "hostile" if path == letter else path.partition("?")[0].strip("/").replace("/", "-")
        check_layout(page, name or "overview")
    page.goto("/dead?key=account+2")
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="Redrive").wait_for()
    check_layout(page, "letter")


def test_the_pictures_in_the_guide_show_the_current_page() -> None:
    found = hashlib.sha256()
    for folder in ("templates", "static"):
        for path in sorted((RAW / "src" / "onceward" / "page" / folder).iterdir()):
            found.update(path.read_bytes())
    guide = (RAW / "docs" / "operations-page.md").read_text("utf-8")

    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", guide)
    assert set(shown) == {one for one in PICTURES if not one.endswith("-dark.png")}
    # Take them with PAGE_SHOTS, look at them, copy them, and only then change these hashes.
    for picture, (shot, digest) in PICTURES.items():
        content = (RAW / "docs" / picture).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest, f"{picture} is not {shot}"
    assert found.hexdigest() == PICTURED


def test_nothing_comes_from_elsewhere(page: Page, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in PAGES:
        page.goto(path)
    assert len(asked) >= 2 * len(PAGES)
    assert all(url.startswith(f"{address}/") for url in asked)


def test_who_is_not_logged_in_hears_nothing(address: str) -> None:
    try:
        with urlopen(f"{address}/live", timeout=5) as answer:
            assert answer.url == f"{address}/login"
    except HTTPError as error:
        pytest.fail(str(error))
