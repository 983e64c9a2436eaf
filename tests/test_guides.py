"""The guides to errors against the engine that they describe."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from benchmarks.measures import MEASURES
from chaos.schedule import KINDS

from tests.baked import (
    RAW,
    ROOT,
    BakedProject,
    Template,
    clean_environment,
    features,
    names_of_tests,
    variants,
)

HANDLERS = (RAW / "docs" / "handlers.md").read_text("utf-8")
RETRIES = (RAW / "docs" / "retries.md").read_text("utf-8")
TESTING = (RAW / "docs" / "testing.md").read_text("utf-8")
WRITER = (RAW / "docs" / "writer.md").read_text("utf-8")
RETENTION = (RAW / "docs" / "retention.md").read_text("utf-8")
REPLAY = (RAW / "docs" / "replay.md").read_text("utf-8")
SCHEDULING = (RAW / "docs" / "scheduling.md").read_text("utf-8")
SEQUENCES = (RAW / "docs" / "sequences.md").read_text("utf-8")
EXISTING = (RAW / "docs" / "existing-database.md").read_text("utf-8")
GLOSSARY = (RAW / "docs" / "glossary.md").read_text("utf-8")
MONITORING = (RAW / "docs" / "monitoring.md").read_text("utf-8")
DEAD_LETTERS = (RAW / "docs" / "dead-letters.md").read_text("utf-8")
DEAD_EVENTS = (RAW / "docs" / "dead-events.md").read_text("utf-8")
REASONS = (RAW / "docs" / "reasons.md").read_text("utf-8")
OPERATING = MONITORING + DEAD_LETTERS + DEAD_EVENTS + REASONS
ARCHIVE = (RAW / "docs" / "archive.md").read_text("utf-8")
CODECS = (RAW / "docs" / "codecs.md").read_text("utf-8")
DEBEZIUM_INPUT = (RAW / "docs" / "debezium-input.md").read_text("utf-8")
PERSONAL = (RAW / "docs" / "personal-data.md").read_text("utf-8")
ERASURE = (RAW / "docs" / "erasure.md").read_text("utf-8")
HTTP = (RAW / "docs" / "http.md").read_text("utf-8")
OUTSIDE = (RAW / "docs" / "outside.md").read_text("utf-8")
SAGAS = (RAW / "docs" / "sagas.md").read_text("utf-8")
SAGA = (RAW / "docs" / "saga.py").read_text("utf-8")
SAGA_TEST = (RAW / "docs" / "saga_test.py").read_text("utf-8")
TEMPLATES = (ROOT / "README.md").read_text("utf-8")
ENGINE = RAW / "src" / "onceward"
BEFORE = """```python
from datetime import datetime

from sqlalchemy import Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Aggregate, Event, Handlers, Park, Policy, Reject, Transaction
from onceward.plain import Header, Plain

handlers = Handlers()


class Base(DeclarativeBase):
    pass


class Order(Aggregate, Base):
    __tablename__ = "order"

    id: Mapped[str] = mapped_column(Text, primary_key=True)


class Parcel(Aggregate, Base):
    __tablename__ = "parcel"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    place: Mapped[str] = mapped_column(Text)
    scans: Mapped[int]

    def move_to(self, place: str, at: datetime) -> None:
        self.place = place


class ScanRecorded(Event, type="scan.recorded.v1"):
    scanner: str
    number: int
    parcel_id: str
    place: str
    scanned_at: datetime


class ParcelMoved(Event, type="parcel.moved.v1", topic="parcel-events"):
    parcel_id: str
    place: str
    scans: int
    scanner: str
    number: int


class PaymentAsked(Event, type="payment.asked.v1"):
    order_id: str
    cents: int
```
"""
"""What the template's README and the guide to codecs use and don't show."""

STOCK = """```python
class Shelf(Aggregate, Base):
    __tablename__ = "shelf"

    article: Mapped[str] = mapped_column(Text, primary_key=True)
    free: Mapped[int]
    reserved: Mapped[int]


@handlers.on(StockRequested, topic="stock-requests", consumer="stock", loads=Shelf.by("article"))
async def reserve(asked: StockRequested, tx: Transaction) -> None:
    shelf = await tx.load(Shelf, asked.article)
    if shelf is None or shelf.free < asked.pieces:
        tx.publish(StockRefused(order_id=asked.order_id), key=asked.order_id)
    else:
        shelf.free -= asked.pieces
        shelf.reserved += asked.pieces
        tx.publish(StockReserved(order_id=asked.order_id), key=asked.order_id)


@handlers.on(StockReleased, topic="stock-requests", consumer="stock", loads=Shelf.by("article"))
async def put_back(released: StockReleased, tx: Transaction) -> None:
    shelf = await tx.load_or_create(Shelf, released.article)
    shelf.reserved -= released.pieces
    shelf.free += released.pieces


@handlers.on(OrderShipped, topic="order-events", consumer="stock", loads=Shelf.by("article"))
async def hand_over(shipped: OrderShipped, tx: Transaction) -> None:
    shelf = await tx.load_or_create(Shelf, shipped.article)
    shelf.reserved -= shipped.pieces


async def test_a_refused_order_is_settled_in_whatever_way_the_answers_come(
    harness: Harness,
) -> None:
    refused = PaymentRefused(order_id="o-1")
    messages = [Sent(one, "o-1") for one in (PLACED, RESERVED, refused, OVERDUE)]
    await harness.explore(messages, invariant=partial(is_settled, reserved=1), at_most=40)
    out = StockRefused(order_id="o-1")
    messages = [Sent(one, "o-1") for one in (PLACED, out, OVERDUE)]
    await harness.explore(messages, invariant=is_settled, at_most=40)


async def test_money_taken_too_late_is_refunded_wherever_the_process_dies(
    harness: Harness,
) -> None:
    async for crash in harness.each_crash():
        provider = Provider()
        provider.is_down = True
        for event in (PLACED, RESERVED):
            await harness.handle(event, key="o-1")
        await provider.answer_calls(harness)
        await harness.handle(OVERDUE, key="o-1")
        provider.is_down = False
        await harness.advance(hours=1)  # the call is repeated
        await provider.answer_calls(harness)
        await harness.handle(TAKEN, key="o-1")
        await provider.answer_calls(harness)
        await harness.advance(hours=1)  # a call over which the process died is due later
        await provider.answer_calls(harness)
        assert len(provider.taken) == len(provider.refunded) == 1, crash


async def play(harness: Harness, provider: Provider) -> None:
    handled = 0
    while new := (await harness.records())[handled:]:
        handled += len(new)
        read = [one for one in new if not isinstance(one.event, OrderCancelled)]
        await harness.handle_batch([Sent(one.event, one.key) for one in read])
        await provider.answer_calls(harness)


async def test_an_order_that_is_paid_goes_through_all_topics_and_is_shipped(
    harness: Harness,
) -> None:
    provider = Provider()
    async with harness.session() as session:
        session.add(Shelf(article="book", free=5, reserved=0))
    await harness.handle(PLACED)
    await play(harness, provider)
    await harness.advance(hours=1)
    await play(harness, provider)
    assert (await harness.get(Order, "o-1")).state == "shipped"
    shelf = await harness.get(Shelf, "book")
    assert (shelf.free, shelf.reserved) == (3, 0)
    assert len(provider.taken) == 1
    assert OrderOverdue not in [type(one.event) for one in await harness.records()]


async def test_a_payment_that_nobody_has_answered_is_redriven_and_refunded(
    harness: Harness,
) -> None:
    provider = Provider()
    provider.is_down = True
    for event in (PLACED, RESERVED):
        await harness.handle(event, key="o-1")
    for _ in range(20):
        await provider.answer_calls(harness)
        await harness.advance(hours=2)
    await harness.handle(OVERDUE, key="o-1")
    (letter,) = await harness.dead_letters()
    assert (letter.consumer, letter.reason) == ("take-payment", "attempts used up")
    provider.is_down = False
    await harness.redrive(letter)
    await provider.answer_calls(harness)
    await harness.handle(TAKEN, key="o-1")
    await provider.answer_calls(harness)
    assert len(provider.taken) == len(provider.refunded) == 1
```
"""
"""The stock, which the guide to sagas leaves to another service, and tests that need it."""


def examples(text: str) -> list[str]:
    """Return the guide's examples."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def blocks(text: str) -> str:
    """Return the guide's examples as one module: later ones go on from the earlier."""
    return "\n\n".join(examples(text))


WHOLE_SAGA = f"```python\n{SAGA}```\n```python\n{SAGA_TEST}```\n".replace(
    re.search(r"from saga import \(.*?\n\)\n", SAGA_TEST, re.DOTALL)[0],  # type: ignore[index]
    "",
)
"""The files of the guide to sagas, as one module."""


def assigned(module: str, name: str) -> ast.expr:
    """Return what a module of the engine assigns to a name."""
    for node in ast.parse((ENGINE.parent / module).read_text("utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
            return node.value
    raise LookupError(name)


def fields(module: str, name: str) -> list[str]:
    """Return the fields of a class of the engine, with their defaults."""
    for node in ast.parse((ENGINE.parent / module).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
    raise LookupError(name)


CACHE = {name: os.environ[name] for name in ["PYTHONPYCACHEPREFIX"] if name in os.environ}
"""Where processes find bytecode, and write it: not into the raw tree."""

AUTHORS_EXAMPLES = {
    "handlers": HANDLERS,
    "retries": RETRIES,
    "testing": HANDLERS + TESTING,
    "writer": WRITER,
    "existing_database": EXISTING,
    "scheduling": SCHEDULING,
    "sequences": SEQUENCES,
    "outside": OUTSIDE,
    "http": HTTP,
    "personal_data": PERSONAL,
    "erasure": ERASURE,
    "sagas": WHOLE_SAGA + STOCK,
    "codecs": BEFORE + CODECS,
    "debezium_input": DEBEZIUM_INPUT,
    "read_mes": BEFORE + TEMPLATES,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([], id="run"),
        pytest.param(["-m", "mypy", "--strict"], id="types", marks=pytest.mark.full),
    ],
)
def test_the_examples_for_authors_of_handlers_work(tmp_path: Path, command: list[str]) -> None:
    for name, guide in AUTHORS_EXAMPLES.items():
        (tmp_path / f"{name}_examples.py").write_text(blocks(guide), "utf-8")
    modules = sorted(str(path) for path in tmp_path.glob("*_examples.py"))
    config = ["--config-file", str(RAW / "pyproject.toml")]
    for arguments in [[*command, *config, *modules]] if command else [[one] for one in modules]:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(RAW / "src"), "MYPYPATH": str(RAW / "src"), "PATH": ""} | CACHE,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


CONFTEST = """
import pytest
from sqlalchemy.orm import DeclarativeBase

from onceward import Service

import test_examples
from tests.servers import databases

pytest_plugins = [PLUGIN]


class Empty(DeclarativeBase):
    pass


Base = getattr(test_examples, "Base", Empty)
opening = getattr(test_examples, "open_resources", None)


@pytest.fixture(scope="session")
def harness_service():
    handlers, tables = test_examples.handlers, Base.metadata
    return Service("guide", handlers, tables, workers=WORKERS, resources=opening)


@pytest.fixture(scope="session")
def harness_migrate():
    config = databases.migrations_of_the_engine()
    return lambda url: databases.build(url, config, Base.metadata)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    "guide",
    [
        pytest.param(HANDLERS + TESTING, id="testing"),
        pytest.param(SCHEDULING, id="scheduling"),
        pytest.param(HTTP, id="http"),
        pytest.param(OUTSIDE, id="outside", marks=pytest.mark.full),
        pytest.param(WHOLE_SAGA + STOCK, id="sagas", marks=pytest.mark.full),
    ],
)
def test_the_tests_that_the_guides_show_pass(tmp_path: Path, guide: str) -> None:
    plugin = "onceward.http.testing" if guide is HTTP else "onceward.testing.plugin"
    calls = "onceward.effects" in guide
    done = run_tests_of(tmp_path, blocks(guide), makes_calls=calls, plugin=plugin)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = blocks(guide).count("async def test_")
    assert f"{shown} passed" in done.stdout


def test_the_guide_to_sagas_shows_parts_of_its_files() -> None:
    answer, test = examples(SAGAS)
    assert answer in SAGA
    assert test in SAGA_TEST


@pytest.mark.full
@pytest.mark.integration
@pytest.mark.parametrize(
    ("careful", "careless"),
    [
        ('if order.state in ("reserving", "paying"):', "if True:"),
        ("# it came too late\n            release(order, tx)", "\n            pass"),
        ('    if order.state == "paying":\n        release(order, tx)\n    if', "    if"),
        ("tx.call(refund, of=order)", "pass"),
        ("or order.state == too_early", ""),
    ],
    ids=["time-out", "late stock", "stock of the overdue", "late payment", "early payment"],
)
def test_the_saga_without_one_of_its_precautions_fails_its_tests(
    tmp_path: Path, careful: str, careless: str
) -> None:
    code = blocks(WHOLE_SAGA + STOCK)
    assert code.count(careful) == 1
    failed = run_tests_of(
        tmp_path, code.replace(careful, careless), "-xk", "answers_come", makes_calls=True
    )
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "E       scenario: messages in the order" in failed.stdout


def run_tests_of(
    tmp_path: Path,
    code: str,
    *arguments: str,
    makes_calls: bool,
    plugin: str = "onceward.testing.plugin",
) -> subprocess.CompletedProcess[str]:
    """Run the tests of a module as a service would."""
    module = tmp_path / "test_examples.py"
    module.write_text(code, "utf-8")
    workers = "from onceward.effects import EffectWorkers\nWORKERS = [EffectWorkers]\n"
    conftest = (workers if makes_calls else "WORKERS = []\n") + f"PLUGIN = {plugin!r}\n" + CONFTEST
    (tmp_path / "conftest.py").write_text(conftest, "utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n", "utf-8"
    )
    return subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, module],
        cwd=tmp_path,
        env={
            "PYTHONPATH": f"{RAW / 'src'}:{RAW}:{tmp_path}",
            "PATH": "",
            "PIPELINE_DATABASE_URL": os.environ["PIPELINE_DATABASE_URL"],
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "answers", list(variants()), ids=lambda given: "-".join(map("=".join, given.items()))
)
def test_every_guide_comes_with_a_service_whose_read_me_points_to_it(
    template: Template, output: Path, answers: dict[str, str]
) -> None:
    project = template.bake(output, **answers)
    guides = {name for name in project.files() if re.fullmatch(r"docs/.*\.md", name)}
    names = {
        "checklist",
        "cloud-login",
        "codecs",
        "contracts",
        "delivery-guarantees",
        "dead-events",
        "dead-letters",
        "debezium-input",
        "deploying",
        "existing-database",
        "failures",
        "glossary",
        "handlers",
        "how-it-works",
        "incidents",
        "monitoring",
        "protocol",
        "protocol-failures",
        "protocol-relay",
        "reasons",
        "releases",
        "replay",
        "retention",
        "retries",
        "runbook",
        "scaling",
        "scheduling",
        "security",
        "sequences",
        "settings",
        "shared-rows",
        "stopping",
        "testing",
        "updating",
        "writer",
    }
    if answers["worked_example"] == "payments":
        names |= {"payments-example"}
    if answers["object_store"] == "yes":
        names |= {"archive", "claims"}
    if answers["outside_calls"] == "yes":
        names |= {"outside", "sagas"}
    if answers["personal_data"] == "yes":
        names |= {"erasure", "personal-data"}
    if answers["schema_registry"] == "yes":
        names |= {"schema-registry"}
    if answers["operations_page"] == "yes":
        names |= {"operations-page"}
    if answers["history"] == "yes":
        names |= {"history"}
    if answers["http_api"] == "yes":
        names |= {"http"}
    if answers["debezium"] == "yes":
        names |= {"debezium"}
    assert guides == {f"docs/{name}.md" for name in names}
    named = re.compile(r"`(docs/[\w./-]+)`")
    assert set(named.findall(project.read("README.md"))) == guides
    for name, content in project.files().items():
        if name.endswith((".md", ".py")):
            assert set(named.findall(content.decode())) <= guides, name


@pytest.mark.parametrize("engine_tests", ["yes", "no"])
def test_every_test_named_by_a_service_exists_or_comes_with_engine_tests(
    template: Template, output: Path, engine_tests: str
) -> None:
    project = template.bake(output, engine_tests=engine_tests, http_api="yes", debezium="yes")
    names = set(project.files())
    tests = (name for name in names if re.fullmatch(r"tests/.*\.py", name))
    known = names_of_tests({name: project.read(name) for name in tests})
    for page in sorted(name for name in names if name.endswith(".md")):
        text = project.read(page)
        named = set(re.findall(r"`(test_\w+)(?:\.py)?`", text)) - known
        named |= {
            path
            for path in re.findall(r"`(tests/[\w/]+)/?`", text)
            if not (project.path / path).exists()
        }
        if engine_tests == "yes":
            assert named == set(), page
        else:
            assert not named or "generated with `engine_tests=yes`" in text, page


def test_every_bullet_of_the_delivery_guarantees_names_a_test() -> None:
    page = (RAW / "docs" / "delivery-guarantees.md").read_text("utf-8")
    bullets = re.findall(r"^ *- .*(?:\n +(?!- ).*)*", page, re.MULTILINE)
    assert len(bullets) > 25
    for bullet in bullets:
        assert "`test_" in bullet or bullet == "- A partition waits", bullet
    shared = re.findall(r"^\| .* \| .* \| (.*) \|$", page.partition("## Defaults")[0], re.MULTILINE)
    assert shared[:2] == ["test", "---"]
    assert all(re.fullmatch(r"`test_\w+`", test) for test in shared[2:])
    assert len(page.split()) <= 1_200


def test_every_page_that_the_template_names_exists() -> None:
    for page in re.findall(r"`(docs/[\w./-]+)`", (ROOT / "README.md").read_text("utf-8")):
        assert [*ROOT.glob(f"{page}*"), *RAW.glob(f"{page}*")], page


def test_every_picture_that_a_page_shows_exists() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), RAW / "README.md", *RAW.glob("docs/*.md")]
    pictures = [
        page.parent / picture
        for page in pages
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text("utf-8"))
    ]
    assert len(pictures) >= 5
    assert [one for one in pictures if not one.is_file()] == []


def columns(module: str, name: str) -> set[str]:
    """Return the columns that a store of dead letters or dead events selects."""
    found: set[str] = set()
    for node in ast.parse((ENGINE.parent / module).read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for one in node.body:
                if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in (
                    "entry",
                    "detail",
                ):
                    select = re.sub(
                        r"\([^()]*(?:\([^()]*\)[^()]*)*\)", "", ast.literal_eval(one.value)
                    )
                    expressions = select.replace("::text", "").split(",")
                    found |= {each.split()[-1].strip('"') for each in expressions}
    return found | {"state", "since", "advice"}


def in_first_cells(text: str) -> set[str]:
    """Return the names that are alone, between backticks, in the first cell of a table's row."""
    return set(re.findall(r"^\| `([^`|]+)` \|", text, re.MULTILINE))


def test_the_glossary_has_the_words_that_the_service_explains() -> None:
    """After a change of the words, WRITE_GLOSSARY=1 writes the page."""
    page = RAW / "docs" / "glossary.md"
    words = json.loads((ENGINE / "cli" / "words.json").read_text("utf-8"))
    assert list(words) == sorted(words)
    assert len(words) <= 50
    rows = (f"| **{name}** | {' | '.join(word.values())} |\n" for name, word in words.items())
    head, line, _ = GLOSSARY.partition("| --- | --- | --- |\n")
    text = head + line + "".join(rows)
    if os.environ.get("WRITE_GLOSSARY"):
        page.write_text(text, "utf-8")
    assert page.read_text("utf-8") == text


def test_every_reason_is_in_the_guide_for_operators() -> None:
    known = set(ast.literal_eval(assigned("onceward/cli/dead_letters.py", "REASONS")))
    assert in_first_cells(REASONS.partition("## Events")[0]) == known


def test_every_reason_for_an_unsent_event_is_in_the_operators_guide() -> None:
    known = set(ast.literal_eval(assigned("onceward/cli/dead_events.py", "REASONS")))
    assert in_first_cells(REASONS.partition("## Events")[2]) == known


def test_the_fields_for_scripts_are_some_of_those_that_the_commands_write() -> None:
    written = {
        *columns("onceward/cli/dead_letters.py", "DeadLetters"),
        *("found", "redriven", "became", "died", "discarded"),
    }
    paragraph = re.search(r"^For scripts, .*?(?=\n\n)", DEAD_LETTERS, re.DOTALL | re.MULTILINE)
    assert paragraph
    named = set(re.findall(r"`([a-z_]+)`", paragraph[0])) - {"list", "show", "redrive", "discard"}
    assert len(named) > 5
    assert named <= written
    assert "`size`" in DEAD_EVENTS
    assert "size" in columns("onceward/cli/dead_events.py", "DeadEvents")


@pytest.mark.parametrize(
    ("threshold", "alert", "line"),
    [
        ("CONSUMER_DELAY", "ConsumerDelay", "> {:.0f}"),
        ("OUTBOX_LAG", "OutboxLag", "> {:.0f}"),
        ("BACKLOG_AGE", "BacklogAge", "> {:.0f}"),
        ("PAUSED", "Paused", "> {:.0f}"),
        ("NO_PARTITION_AHEAD", "NoPartitionAhead", "< {} * 86400"),
        ("EVENTS_REJECTED", "EventsRejected", "for: {:.0f}m"),
    ],
)
def test_the_doctor_and_the_alerts_have_the_same_thresholds(
    threshold: str, alert: str, line: str
) -> None:
    value = ast.literal_eval(assigned("onceward/cli/health.py", threshold))
    alerts = (RAW / "deploy" / "prometheus" / "alerts.yaml").read_text("utf-8")
    rule = alerts.partition(f"- alert: {alert}\n")[2].partition("- alert: ")[0]
    assert line.format(value / 60 if line.startswith("for") else value) in rule


def test_the_settings_and_defaults_that_the_guides_name_exist() -> None:
    modules = (ENGINE / "settings.py", ENGINE / "server_settings.py")
    settings = "".join(module.read_text("utf-8") for module in modules)
    claims = (ENGINE / "claims" / "settings.py").read_text("utf-8")
    guides = "".join(
        (HANDLERS, RETRIES, TESTING, WRITER, RETENTION, REPLAY, SCHEDULING, SEQUENCES, GLOSSARY)
    )
    for name in re.findall(r"`PIPELINE_(\w+)`", guides + OPERATING + OUTSIDE + ARCHIVE):
        if name.startswith("CLAIM_"):
            assert f"    {name.removeprefix('CLAIM_').lower()}: " in claims, name
        elif name not in ("ARCHIVE_URL", "EFFECT_CALLS"):  # of other packages
            assert f"    {name.lower()}: " in settings, name
    policy = (ENGINE / "handlers/policy.py").read_text("utf-8")
    for name in fields("onceward/handlers/policy.py", "Policy"):
        assert f"| `{name}`" in RETRIES
    assert "attempts: int = 6" in policy
    assert "(30.0, 120.0, 480.0, 1_920.0, 3_600.0)" in policy
    assert "breaker_keys: Count = 20" in settings
    assert "unclean_starts: Count = 3" in settings
    assert "relay_topic_pause: Seconds = 5.0" in settings
    assert "relay_lease: Annotated[Seconds, Field(ge=1)] = 10.0" in settings
    assert "hang_timeout: Annotated[Seconds, Field(ge=2)] = 30.0" in settings


PARSE = """
import contextlib, io, shlex, sys
from parcel_tracker.main import main
for line in sys.stdin:
    # With a question for help nothing is done, but options and commands must exist.
    sys.argv = ["service", *shlex.split(line, comments=True), "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    if code:
        print(line, said.getvalue())
"""


EXAMPLES = """
import typer
from parcel_tracker.main import main

def examples(command, *path):
    for name, one in getattr(command, "commands", {}).items():
        commands = getattr(one, "commands", None)
        if commands:
            examples(one, *path, name)
        if not commands or one.invoke_without_command:
            print(" ".join([*path, name]), one.epilog, sep="|")

examples(typer.main.get_command(main))
"""


def told(code: str, lines: Iterable[str], project: BakedProject) -> str:
    """Return what Python says to these lines, beside the service's source."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        input="\n".join(lines),
        env={"PYTHONPATH": str(project.path / "src"), "PATH": "", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_of_a_service_has_an_example_that_is_one(
    default_project: BakedProject,
) -> None:
    listed = [line.split("|") for line in told(EXAMPLES, [], default_project).splitlines()]
    names = {name for name, _ in listed}
    assert {"claims sweep", "archive find", "dead events list", "run", "relay", "page"} < names
    for name, epilog in listed:
        assert epilog.startswith(f"For example: service {name}"), name
    examples = [epilog.removeprefix("For example: service ") for _, epilog in listed]
    assert told(PARSE, examples, default_project) == ""


ON_THE_PAGE = {
    "status": "/",
    "doctor": "/doctor",
    "dead list": "/dead",
    "dead show": "/dead/{id}",
    "dead redrive": "/dead/redrive",
    "dead discard": "/dead/discard",
    "dead edit": "/dead/{id}/copy",
    "dead events list": "/events",
    "dead events show": "/events/{id}",
    "dead events redrive": "/events/redrive",
    "dead events discard": "/events/discard",
    "scheduled list": "/scheduled",
    "scheduled cancel": "/scheduled/cancel",
    "pause": "/stops/pause",
    "throttle": "/stops/pause",
    "resume": "/stops/resume",
    "topics seek": "/positions/move",
    "replay": "/positions/move",
    "retention status": "/retention",
    "retention skip-archive": "/retention/skip-archive",
    "timeline": "/timeline",
    "affected": "/affected",
    "correct": "/correct/begin",
    "help words": "/words",
}
"""Commands that the operations page has, too, and where."""


def test_every_command_is_on_the_operations_page_or_named_as_command_only(
    default_project: BakedProject,
) -> None:
    listed = told(EXAMPLES, [], default_project).splitlines()
    names = {line.partition("|")[0] for line in listed}
    guide = (RAW / "docs" / "operations-page.md").read_text("utf-8")
    only = re.findall("`([^`]+)`", guide.partition("Only commands: ")[2].partition(";")[0])
    groups = tuple(f"{one} " for one in only)
    left = names - ON_THE_PAGE.keys()
    assert {one for one in left if not f"{one} ".startswith(groups)} == set()
    assert not ON_THE_PAGE.keys() & {*only}
    views = [
        RAW / "src" / "onceward" / "page" / "app.py",
        RAW / "src" / "onceward" / "history" / "views.py",
    ]
    routes = "".join(one.read_text("utf-8") for one in views)
    assert [path for path in ON_THE_PAGE.values() if f'"{path}"' not in routes] == []


TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), RAW / "README.md", *RAW.glob("docs/*.md")]
PAGES += [ROOT / "AGENTS.md", RAW / "AGENTS.md", RAW / "SKILL.md"]


def commands(page: str) -> set[str]:
    """Return what a page has `service` do: on lines of their own, in pods, and in its sentences."""
    lines = r"^(?:\$ |kubectl exec .* -- )?(?:\S*/)?service (.*)"
    found = set(re.findall(lines, blocks_of_shells(page), re.MULTILINE))
    # `--install-completion` would do it, asked for help or not; a test below does.
    sentences = r"`(?:\.venv/bin/)?service ((?!-)[^`]+(?:`, `[a-z]+(?: [A-Z]+)?)*)`"
    for inline in re.findall(sentences, page):
        first, *others = re.split(r"`, `| \| ", " ".join(inline.split()))
        group = first.partition(" -")[0].rpartition(" ")[0] if others else ""
        found |= {first, *(f"{group} {one}" for one in others)}
    return found


def test_every_command_that_a_page_shows_exists_with_its_options(
    template: Template, output: Path
) -> None:
    project = template.bake(output, **dict.fromkeys(features(), "yes"))
    shown = set().union(*(commands(page.read_text("utf-8")) for page in PAGES))
    made_up = ["dead list --reasons failed", "dead walk"]

    said = told(PARSE, [*sorted(shown), *made_up], project)

    assert len(shown) > 60
    assert {"status", "archive find ID"} < shown
    assert any(one.startswith("dead events discard ") for one in shown)
    assert "retention skip-archive DAY" in shown
    assert "adopt --keep-progress" in shown
    first, second = re.split(rf"(?m)^(?={made_up[1]})", said)
    assert first.startswith(made_up[0]), said
    assert second.startswith(made_up[1]), said


def test_what_a_page_shows_for_a_shell_is_shell(default_project: BakedProject) -> None:
    for page in PAGES:
        for block in for_a_shell(page.read_text("utf-8")):
            default_project.run("bash", "-n", "-c", block)


def targets(page: str) -> set[str]:
    """Return what a page has `make` make."""
    lines = (*blocks_of_shells(page).splitlines(), *re.findall(r"`([^`\n]+)`", page))
    made = [re.match(r"(?:[A-Z_]+=\S+ )*make ([^#]+)", line) for line in lines]
    return {one[1].strip() for one in made if one}


@pytest.mark.parametrize("owner", ["template", "service"])
def test_what_a_page_has_made_can_be(owner: str, template: Template, output: Path) -> None:
    project = template.bake(output, engine_tests="yes", http_api="yes")
    services = [page for page in PAGES if RAW in page.parents or page == TUTORIAL]
    pages = [page for page in PAGES if (page in services) == (owner == "service")]
    named = set().union(*(targets(page.read_text("utf-8")) for page in pages))
    if owner == "template":
        named -= {"run", "update"}  # behind a `cd`, or said of a service: its own
    expected = {
        "template": {
            "test-unit",
            "test-full",
            "chaos-selftest",
            "model",
            "demo KEEP=1",
            "bench ONLY=layers",
        },
        "service": {"run", "down", "schema", "test-pooler", "clean"},
    }
    assert expected[owner] < named
    for one in sorted(named):
        # Even then a line is run that calls make again; so what it would be run by does nothing.
        command = ["make", "--dry-run", "STACK=true", f"VENV={sys.prefix}", *one.split()]
        where = ROOT if owner == "template" else project.path
        done = subprocess.run(
            command, cwd=where, env=clean_environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


ELSEWHERE = {
    "make demo": "tests/test_demo.py, with fewer scans",
    "make test-unit": "a part of what runs this",
    "make chaos-selftest": "tests/test_chaos.py: one sabotage by `make test-full`; that all fit",
    "make chaos": "tests/test_chaos.py: rounds of a minute, and which round a report is of",
    "make bench": "tests/test_bench.py: a small one by `make test-full`",
    "python -m demo.traced": "tests/test_traced.py: all but where the picture is written to",
    "python -m benchmarks.capacity": "tests/test_capacity.py",
    ".venv/bin/python dev/stack.py run -- .venv/bin/python -m pytest": "below: which tests it runs",
    "../.venv/bin/python dev/stack.py run": "what runs this, with one file",
    ".venv/bin/python '<<cookiecutter.service_name>>/dev/stack.py' run": "what runs this",
    "REPOSITORY=": "below",
    "python3 -m venv env && env/bin/pip install": "below",
    "cd parcel-tracker && make run": "tests/test_bare_machine.py, and tests/test_bake.py",
}
"""What the template's own pages show for a shell, and where it is run, as far as it is."""


def test_what_the_pages_of_the_template_show_is_run_somewhere() -> None:
    pages = [page.read_text("utf-8") for page in PAGES if RAW not in page.parents]
    pages.remove(TUTORIAL.read_text("utf-8"))  # tests/test_tutorial.py follows it
    lines = [line for page in pages for block in for_a_shell(page) for line in block.splitlines()]
    found = {line: next((one for one in ELSEWHERE if line.startswith(one)), None) for line in lines}
    assert [line for line, one in found.items() if one is None] == []
    assert set(found.values()) == set(ELSEWHERE)


@pytest.mark.full
def test_the_read_me_generates_a_service_without_a_system_pip(tmp_path: Path) -> None:
    (block,) = [one for one in for_a_shell(TEMPLATES) if "cookiecutter>=2.6" in one]
    block = block.removesuffix("&& make run\n")
    environment = tmp_path / "environment"
    # As where the system's Python has no pip, or refuses to install for all users.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    answering = block.replace("../onceward", shlex.quote(str(ROOT)))
    assert answering != block
    done = subprocess.run(
        ["bash", "-euc", f"{answering}\nmake"],
        cwd=tmp_path,
        env={
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
            "HOME": str(tmp_path),
            "PATH": f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "make run" in done.stdout


def test_the_id_from_a_request_is_made_as_in_the_payments_example() -> None:
    (made,) = re.findall(r"`(uuid5\(.+?\))`", HTTP)
    assert made in (RAW / "src" / "<<cookiecutter.package_name>>" / "handlers.py").read_text(
        "utf-8"
    )


@pytest.mark.full
def test_uv_generates_a_service_without_an_environment_as_the_read_me_says(
    template: Template, output: Path
) -> None:
    (command,) = re.findall(r"`(uvx [^`]+)`", TEMPLATES)
    output.mkdir()

    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=output,
        env={
            **clean_environment(),
            "COOKIECUTTER_CONFIG": str(template.home / "config.yaml"),
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "REPOSITORY": str(template.path),
        },
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Next: cd parcel-tracker && make run" in done.stdout


def programs() -> set[str]:
    """Return what the template's own pages have Python run: themselves, or by `make`."""
    pages = [one.read_text("utf-8") for one in (ROOT / "README.md", *ROOT.glob("docs/*.md"))]
    lines = [
        line.partition("#")[0].strip()
        for page in pages
        for line in (*blocks_of_shells(page).splitlines(), *re.findall(r"`([^`\n]+)`", page))
    ]
    found = {line.removeprefix("python -m ") for line in lines if line.startswith("python -m ")}
    for line in lines:
        # Those of a service, and the tests themselves, are run by other tests.
        if made := re.match(r"(?:[A-Z_]+=\S+ )*make ((?:demo|chaos|bench)\b.*)", line):
            told = subprocess.run(
                ["make", "--dry-run", *made[1].split()],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.replace("\\\n", " ")
            found |= {
                " ".join(one.split()) for one in re.findall(r"python -m ((?!pip|venv).*)", told)
            }
    return found


@pytest.mark.slow
def test_every_program_that_a_page_shows_takes_its_options() -> None:
    shown = programs()
    assert {one.split()[0] for one in shown} >= {"benchmarks.run", "chaos.run", "demo.traced"}
    for program in sorted(shown):
        module, *options = program.split()
        helped = subprocess.run(
            [sys.executable, "-m", module, *options, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert helped.returncode == 0, helped.stderr
        for option in options:
            if option.startswith("--"):
                assert option.partition("=")[0] in helped.stdout, program


@pytest.mark.slow
def test_what_a_page_chooses_of_faults_and_measures_exists() -> None:
    chosen: dict[str, set[str]] = {"--faults": set(), "--only": set()}
    for program in programs():
        for option, values in re.findall(r"(--faults|--only)[ =](\S+)", program):
            chosen[option] |= set(values.split(","))
    assert {"kill", "pause"} <= chosen["--faults"] <= set(KINDS)
    assert {"layers", "throughput"} <= chosen["--only"] <= set(MEASURES)


@pytest.mark.slow
def test_the_part_of_the_crash_matrix_that_the_page_runs_is_one() -> None:
    page = (ROOT / "docs" / "crash-matrix.md").read_text("utf-8")
    (line,) = re.findall(r"-m pytest (.*)", blocks_of_shells(page))
    arguments = shlex.split(line)

    def selected(*arguments: str) -> set[str]:
        # The servers are asked for only when a test runs.
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments],
            cwd=RAW,
            capture_output=True,
            text=True,
            check=True,
        )
        return {one for one in done.stdout.splitlines() if "::" in one}

    part = selected(*arguments)
    every = selected(*arguments[: arguments.index("-k")])
    assert 0 < len(part) < len(every)
    assert all("consume" in one and "commit" in one for one in part)


@pytest.mark.full
def test_a_shell_that_was_told_to_completes_commands_and_their_options(
    default_project: BakedProject, tmp_path: Path
) -> None:
    service = tmp_path / "service"
    service.write_text(
        f"#!{sys.executable} -B\nfrom parcel_tracker.main import main\n\nmain()\n", "utf-8"
    )
    service.chmod(0o755)

    def bash(text: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"{text}\ntrue"],  # so that the shell stays the one that is asked
            env={
                "PYTHONPATH": str(default_project.path / "src"),
                "PATH": f"{tmp_path}:/usr/bin:/bin",
                "HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    assert "completion installed" in bash("service --install-completion")

    def completed(words: str) -> list[str]:
        last = len(words.split()) - (not words.endswith(" "))
        ask = f'source ~/.bashrc; COMP_WORDS=({words} ""); COMP_CWORD={last};'
        return bash(
            f'{ask} $(complete -p service | grep -o "_[a-z_]*") service\necho "${{COMPREPLY[@]}}"'
        ).split()

    assert "redrive" in completed("service dead ")
    assert "--dry-run" in completed("service dead redrive --d")


def for_a_shell(text: str) -> list[str]:
    """Return what a page shows for a shell, block by block."""
    return re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks_of_shells(text: str) -> str:
    """Return what a page shows for a shell, and of shells."""
    return "\n".join(re.findall(r"^```(?:sh|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
