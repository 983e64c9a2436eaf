"""Secrets planted wherever one can be, and a run in which everything fails: nothing shows them.

The service is a generated one, with all its parts; each of its processes is a real one. A secret is
named by the place that holds it, an output by who has written it.
"""

import asyncio
import json
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import asyncpg  # type: ignore[import-untyped]
import httpx2
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # type: ignore[import-untyped]
from aiokafka.admin import AIOKafkaAdminClient  # type: ignore[import-untyped]

from tests.baked import BakedProject, clean_environment

pytestmark = [pytest.mark.integration, pytest.mark.full]

WITHIN = 240.0
"""Seconds in which a process does what it has to."""
RUN = uuid4().hex[:10]
CLOSED = "127.0.0.1:9"
"""Where nobody listens: the port of a protocol that nobody speaks."""

PLACES = (
    "database password",
    "wrong database password",
    "database password that is not percent-encoded",
    "database key password",
    "Kafka password",
    "Kafka key password",
    "path of the webhook",
    "query of the webhook",
    "page token",
    "wrong page token",
    "key id of the object store",
    "key of the object store",
    "session token of the object store",
    "credentials in the archive's URL",
    "signature in the archive's URL",
    "credentials in the claim store's URL",
    "signature in an event's reference",
    "credentials in the collector's URL",
    "header for the collector",
    "header for the collector that is none",
    "bearer token of a client",
    "secret in another setting",
    "SecretStr of a payload",
    "SecretStr of a model in a payload",
    "marked field of a payload",
    "secret list of a payload",
    "secret field of an invalid payload",
    "secret field of a payload that is cut off",
    "secret field of an undecodable record",
    "value that is invalid",
    "value of a row",
    "value that PostgreSQL can't read",
)


def secret(place: str) -> str:
    """Return the secret of a place; what is searched for has nothing to escape."""
    assert place in PLACES
    return f"planted{PLACES.index(place):02}{RUN}"


PROGRAM = '''"""The service, with topics of its own and with handlers that fail in every way."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated

import httpx2
import sqlalchemy as sa
from pydantic import BaseModel, Field, SecretStr, ValidationError

from onceward import Event, Handlers, Policy, Transaction
from onceward.archive.commands import group as archive_commands
from onceward.claims.commands import app as claims_commands
from onceward.cli.commands import command_line
from onceward.events.event import declared_events
from onceward.history.commands import app as history_commands
from onceward.page.commands import group as page_commands
from onceward.page.settings import PageSettings
from onceward.settings import Settings

from parcel_tracker.handlers import Resources, handlers, open_resources, webhook
from parcel_tracker.main import archive, service

log = logging.getLogger("parcel_tracker.paying")


@asynccontextmanager
async def open_impatient() -> AsyncIterator[Resources]:
    """Open the resources of the example, whose client waits for a second."""
    async with open_resources() as resources:
        resources.client.timeout = httpx2.Timeout(1.0)
        yield resources


class Card(BaseModel):
    number: SecretStr


class Paid(Event, type="paid.v1"):
    how: str
    amount: int = 0
    pin: SecretStr
    card: Card
    iban: Annotated[str, Field(json_schema_extra={"writeOnly": True})]
    codes: list[SecretStr]


@handlers.on(Paid, topic="scans", consumer="pay", policy=Policy(attempts=1))
async def pay(paid: Paid, tx: Transaction, client: httpx2.AsyncClient) -> None:
    """Fail as the payment says."""
    data = json.loads(tx.message.data or b"")
    log.info("paying", extra={"payment": paid, "data": data})
    log.info("paying %s of %s", paid, tx.message.data)
    if paid.how == "text":
        raise ValueError(f"can't pay {paid!r}: {paid}, {tx.message.data!r}, {data}")
    if paid.how == "validation":
        Card.model_validate({"number": [os.environ["VALUE"]]})
    if paid.how == "validation in a text":
        try:
            Card.model_validate({"number": [os.environ["VALUE"]]})
        except ValidationError as error:
            raise RuntimeError(f"no card: {error}") from error
    if paid.how == "row":
        row = {"id": os.environ["ROW"]}
        await tx.session.execute(sa.text("INSERT INTO parcel (id) VALUES (:id)"), row)
    if paid.how == "number":
        value = {"value": os.environ["NUMBER"]}
        await tx.session.execute(sa.text("SELECT CAST(CAST(:value AS text) AS integer)"), value)
    if paid.how == "task":
        async def fail() -> None:
            raise ValueError(f"nobody waits for {data}")
        task = asyncio.create_task(fail())
        await asyncio.sleep(0.01)
        del task
        raise RuntimeError("nobody has waited")
    if paid.how == "client":
        headers = {"Authorization": f"Bearer {os.environ['PAYMENTS_API_KEY']}"}
        url = webhook.get_secret_value() if webhook else ""
        answer = await client.post(url.replace("/hooks", "/refused/hooks"), headers=headers)
        try:
            answer.raise_for_status()
        except httpx2.HTTPError as error:
            raise RuntimeError(f"{headers}: {error} of {webhook}: {answer.text}") from error
    if paid.how == "refused":
        await client.post(os.environ["REFUSED"])


topics = os.environ["TOPICS"]
for event in declared_events():
    if event.__event_topic__:
        event.__event_topic__ = f"{topics}-{event.__event_topic__}"
service = replace(
    service,
    name=topics,
    handlers=handlers.with_topics(lambda topic: f"{topics}-{topic}"),
    resources=open_impatient,
)
main = command_line(
    service,
    history_commands,
    archive=archive_commands(archive),
    claims=claims_commands,
    page=page_commands(service, "onceward.history.views"),
)


def every(commands: list[tuple[dict[str, str], list[str]]]) -> None:
    """Run several commands in turn, each with more settings of its own."""
    ours = dict(os.environ)
    for settings, command in commands:
        os.environ.clear()
        os.environ.update(ours | settings)
        print("service", *command, *settings, flush=True)
        try:
            main(command)
        except SystemExit as ended:
            print("ended with", ended.code, flush=True)


@main.command("unexpectedly")
def fail() -> None:
    """Show the settings, and fail as nobody expects."""
    settings = Settings()
    print(repr(settings), settings, settings.model_dump(), repr(PageSettings()))
    print(settings.model_dump_json())
    raise LookupError(f"{settings.database_url.get_secret_value()} is not what it was")


if sys.argv[1] == "every":
    every(json.loads(sys.argv[2]))
else:
    main()
'''

PAYMENT = {
    "pin": secret("SecretStr of a payload"),
    "card": {"number": secret("SecretStr of a model in a payload")},
    "iban": secret("marked field of a payload"),
    "codes": ["1", secret("secret list of a payload")],
}
FAILURES = (
    *("text", "validation", "validation in a text", "row", "number", "task", "client", "refused"),
)
"""Ways in which the handler of payments fails."""


@dataclass
class Outside:
    """Everything outside that is asked by HTTP: it refuses, and says what it was asked."""

    url: str = ""
    heard: list[str] = field(default_factory=list)
    """Requests, with their headers."""
    traces: bytes = b""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request: spans are taken, and one webhook hangs and one breaks off."""
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        self.heard.append(f"{request.path} {request.headers}")
        if request.path == "/v1/traces":
            self.traces += body
            self._say(request, 200, b"")
        elif b"hang" in body:
            with suppress(OSError):
                request.rfile.read(1)  # until the other side gives up
        elif b"break" not in body:
            code = 500 if request.path.startswith("/hooks") else 400
            # In one line, as some show no other.
            self._say(request, code, f"{request.path} {dict(request.headers)}".encode())

    def _say(self, request: BaseHTTPRequestHandler, code: int, body: bytes) -> None:
        request.send_response(code, body.decode() if code >= 400 else None)
        request.send_header("content-length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)


@asynccontextmanager
async def outside() -> AsyncIterator[Outside]:
    """Run it."""
    one = Outside()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            one.answer(self)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        one.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield one
        finally:
            await asyncio.to_thread(server.shutdown)


def webhook(url: str) -> str:
    """Return the URL of a webhook with its secrets."""
    path, query = secret("path of the webhook"), secret("query of the webhook")
    return f"{url}/hooks/{path}?by={query}"


Commands = Sequence[tuple[Mapping[str, str], Sequence[str]]]
"""What `service` is to be called with in turn, and more settings for each."""


class Run:
    """The run: its processes, and what has been written."""

    def __init__(self, project: BakedProject, folder: Path, outside: Outside) -> None:
        self.topics = f"secrets-{RUN}"
        self.written: dict[str, str] = {}
        """Everything, by its name."""
        self._project, self._program = project, folder / "program.py"
        self._program.write_text(PROGRAM, "utf-8")
        server = os.environ["PIPELINE_DATABASE_URL"]
        self.kafka = os.environ["PIPELINE_KAFKA_BOOTSTRAP_SERVERS"]
        self.admin = server.replace("+asyncpg", "")
        # The user of the service is one of our own, whose password is known to nobody else.
        self.database = self.topics.replace("-", "_")
        host = server.rpartition("@")[2].rpartition("/")[0]
        self.password = f"p@ss:/?#'\"%{secret('database password')}"
        self.url = self.url_with(quote(self.password, safe=""), host)
        self.host = host
        token = quote(f"Bearer {secret('header for the collector')}")
        self.settings = {
            "PIPELINE_DATABASE_URL": self.url,
            "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": self.kafka,
            "PIPELINE_HEALTH_PORT": "0",
            "PIPELINE_LOG_LEVEL": "DEBUG",
            "PIPELINE_LOG_JSON": "true",
            "PIPELINE_OTLP_ENDPOINT": outside.url,
            "PIPELINE_TRACE_SAMPLE_RATIO": "1",
            "PIPELINE_CLAIM_URL": "s3://parcels/claims",
            "PIPELINE_ARCHIVE_URL": "s3://parcels/archive",
            "PIPELINE_DEAD_LETTER_TOPIC": f"{self.topics}-dead",
            "PIPELINE_PAGE_TOKEN": secret("page token"),
            "PIPELINE_PAGE_PORT": "0",
            "PIPELINE_SHUTDOWN_GRACE": "2",
            "AWS_ENDPOINT_URL": outside.url,
            "AWS_REGION": "eu-central-1",
            "AWS_ACCESS_KEY_ID": secret("key id of the object store"),
            "AWS_SECRET_ACCESS_KEY": secret("key of the object store"),
            "AWS_SESSION_TOKEN": secret("session token of the object store"),
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={token},"
            f"none {secret('header for the collector that is none')}",
            "OTEL_METRIC_EXPORT_INTERVAL": "300",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
            "DELAY_WEBHOOK": webhook(outside.url),
            "REFUSED": webhook(f"http://{CLOSED}"),
            "PAYMENTS_API_KEY": secret("bearer token of a client"),
            "VALUE": secret("value that is invalid"),
            "ROW": secret("value of a row"),
            "NUMBER": secret("value that PostgreSQL can't read"),
            "TOPICS": self.topics,
            "COLUMNS": "200",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(project.path / "src"),
        }

    def url_with(self, password: str, host: str | None = None) -> str:
        """Return the URL of the service's database, with another password."""
        return (
            f"postgresql+asyncpg://{self.database}:{password}@{host or self.host}/{self.database}"
        )

    async def start(self, *command: str, **settings: str) -> asyncio.subprocess.Process:
        """Start a process."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            str(self._program),
            *command,
            cwd=self._project.path,
            env={**clean_environment(), **self.settings, **settings},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    async def call(self, name: str, commands: Commands) -> None:
        """Run commands in turn, in a process, to their end; keep what they write."""
        process = await self.start("every", json.dumps(commands))
        try:
            output, _ = await asyncio.wait_for(process.communicate(), WITHIN)
        finally:
            if process.returncode is None:
                process.kill()
        self.written[name] = output.decode()

    @asynccontextmanager
    async def serving(self, name: str, *command: str, **settings: str) -> AsyncIterator[None]:
        """Run a process as long as the block lasts; what it has written so far is kept."""
        process = await self.start(*command, **settings)
        self.written[name] = ""

        async def read() -> None:
            assert process.stdout is not None
            while line := await process.stdout.readline():
                self.written[name] += line.decode()

        reading = asyncio.create_task(read())
        try:
            yield
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), WITHIN)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await reading

    async def until(self, name: str, *texts: str) -> None:
        """Wait until an output has these texts."""
        await until(lambda: all(text in self.written[name] for text in texts), f"{name}: {texts}")

    async def port(self, name: str, pattern: str) -> int:
        """Return the port that a process says it listens on."""
        await until(lambda: re.search(pattern, self.written[name]) is not None, name)
        found = re.search(pattern, self.written[name])
        assert found
        return int(found[1])


async def until(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Wait until the condition holds; fails with `what` did not."""
    try:
        async with asyncio.timeout(WITHIN):
            while True:
                holds = condition()
                if holds if isinstance(holds, bool) else await holds:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"this did not happen: {what}")


@asynccontextmanager
async def prepared(run: Run) -> AsyncIterator[asyncpg.Connection]:
    """Make the service's user, its database and its topics; lend a connection to the database."""
    admin = await asyncpg.connect(run.admin)
    kafka = AIOKafkaAdminClient(bootstrap_servers=run.kafka)
    password = run.password.replace("'", "''")
    await admin.execute(f"CREATE ROLE {run.database} LOGIN PASSWORD '{password}'")
    await admin.execute(f"CREATE DATABASE {run.database} OWNER {run.database}")
    db = await asyncpg.connect(run.admin.rpartition("/")[0] + f"/{run.database}")
    try:
        yield db
    finally:
        await db.close()
        await admin.execute(f"DROP DATABASE {run.database} WITH (FORCE)")
        await admin.execute(f"DROP ROLE {run.database}")
        await admin.close()
        await kafka.start()
        await kafka.delete_topics([one for one in await kafka.list_topics() if run.topics in one])
        await kafka.close()


def records(run: Run) -> list[tuple[bytes, bytes, Mapping[str, str]]]:
    """Return what is sent: keys, values and headers."""
    found: list[tuple[bytes, bytes, Mapping[str, str]]] = []

    def add(key: str, value: bytes | Mapping[str, object], type: str, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        found.append((key.encode(), data, {"ce_type": type, **headers}))

    for how in FAILURES:
        add(f"payment-{how}", PAYMENT | {"how": how}, "paid.v1")
    invalid = {"pin": [secret("secret field of an invalid payload")], "how": 7}
    add("invalid", PAYMENT | invalid, "paid.v1")
    add("cut off", b'{"pin": "%b' % secret(PLACES[27]).encode(), "paid.v1")
    undecodable = b'{"pin": "%b", \xff' % secret("secret field of an undecodable record").encode()
    add("undecodable", undecodable, "paid.v1", ce_specversion="0.3")
    for place in ("fails", "hang", "break"):
        scan = {"scanner": "7", "number": 1, "parcel_id": place, "place": place}
        late = {"scanned_at": "2026-01-01T06:00:00Z", "minutes_late": 75}
        add(place, scan | late, "scan.recorded.v1")
    return found


REFERENCE = (
    "https://elsewhere.example.org/k?X-Amz-Signature="
    + secret("signature in an event's reference"),
    "s3://parcels/claims/other/claims/one",
)
"""Where the last events say that their data is: at another store, and at ours."""


async def send(run: Run, topic: str) -> None:
    """Send everything that fails."""
    common = {"ce_specversion": "1.0", "ce_source": "/tests", "content-type": "application/json"}
    async with AIOKafkaProducer(bootstrap_servers=run.kafka) as producer:

        async def post(id: str, key: bytes, value: bytes, headers: Mapping[str, str]) -> None:
            every = {**common, "ce_id": id, **headers}
            pairs = [(name, text.encode()) for name, text in every.items()]
            await producer.send_and_wait(topic, value, key, headers=pairs)

        for number, (key, value, headers) in enumerate(records(run)):
            await post(f"{number}", key, value, headers)
        for number, reference in enumerate(REFERENCE):
            headers = {"ce_type": "paid.v1", "ce_dataref": reference}
            # The last one waits for its store, and with it its partition.
            await post(f"reference-{number}", b"reference", b"", headers)


def wrong_starts(run: Run) -> Commands:
    """Return starts with wrong settings, or without their servers."""
    password = secret("wrong database password")
    not_encoded = secret("database password that is not percent-encoded")
    wrong = {"PIPELINE_DATABASE_URL": run.url_with(password)}
    nowhere = {
        "PIPELINE_DATABASE_URL": run.url_with(password, CLOSED),
        "PIPELINE_KAFKA_BOOTSTRAP_SERVERS": CLOSED,
    }
    host = {"PIPELINE_DATABASE_URL": run.url_with(f"half@{not_encoded}")}
    port = {"PIPELINE_DATABASE_URL": run.url_with(f"half@other:{not_encoded}")}
    stranger = {
        "PIPELINE_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "PIPELINE_KAFKA_USER": "parcels",
        "PIPELINE_KAFKA_PASSWORD": secret("Kafka password"),
    }
    collector, archive = secret(PLACES[17]), secret("credentials in the archive's URL")
    signature = secret("signature in the archive's URL")
    nonsense = {
        "PIPELINE_BATCH_SIZE": secret("secret in another setting"),
        "PIPELINE_TYPO": secret("secret in another setting"),
        "PIPELINE_OTLP_ENDPOINT": f"http://me:{collector}@127.0.0.1:4318",
        "PIPELINE_ARCHIVE_URL": f"s3://me:{archive}@bucket/x?sig={signature}",
        "PIPELINE_CLAIM_URL": f"s3://me:{secret(PLACES[15])}@bucket",
        "PIPELINE_DATABASE_TLS": "true",
        "PIPELINE_DATABASE_CERTIFICATE_FILE": "/nowhere/key.pem",
        "PIPELINE_DATABASE_KEY_FILE": "/nowhere/key.pem",
        "PIPELINE_DATABASE_KEY_PASSWORD": secret("database key password"),
        "PIPELINE_KAFKA_KEY_PASSWORD": secret("Kafka key password"),
        "PIPELINE_KAFKA_PASSWORD": secret("Kafka password"),
        "PIPELINE_PAGE_ORIGIN": secret("page token"),
    }
    text = {"PIPELINE_LOG_JSON": "false"}
    return [
        *((wrong, command) for command in (["run"], ["status"], ["doctor"], ["dead", "list"])),
        *((nowhere, command) for command in (["topics", "create"], ["doctor"], ["migrate"])),
        *((host | form, ["run"]) for form in ({}, text)),
        *((port | form, ["run"]) for form in ({}, text)),
        *((stranger, command) for command in (["topics", "create"], ["doctor"])),
        *((nonsense | form, ["run"]) for form in ({}, text)),
        *((nonsense, command) for command in (["status"], ["page"], ["archive", "list"])),
        ({}, ["unexpectedly"]),
    ]


PAGES = ("/", "/dead", "/dead?state=waiting", "/events", "/backlog", "/scheduled", "/retention")


async def look_at_page(run: Run, ids: Sequence[str]) -> None:
    """Read every page as a person who has logged in, after a failed attempt."""
    async with run.serving("log of the page", "page"):
        port = await run.port("log of the page", r"http://127\.0\.0\.1:(\d+)/")
        origin = f"http://127.0.0.1:{port}"
        async with httpx2.AsyncClient(
            base_url=origin, headers={"origin": origin}, timeout=WITHIN
        ) as client:
            for token in (secret("wrong page token"), secret("page token")):
                answer = await client.post("/login", data={"name": "ann", "token": token})
                run.written[f"page after a login, {answer.status_code}"] = answer.text
            for path in (*PAGES, "/timeline?key=payment-text", *(f"/dead/{id}" for id in ids)):
                answer = await client.get(path)
                run.written[f"page {path}"] = f"{answer.status_code} {answer.text}"


async def look_at_records(run: Run) -> None:
    """Read what is sent on of dead letters: the values are the records', and stay as they came."""
    topic = f"{run.topics}-dead"
    async with AIOKafkaConsumer(
        topic, bootstrap_servers=run.kafka, auto_offset_reset="earliest"
    ) as consumer:
        (found,) = (await consumer.getmany(timeout_ms=10_000)).values()
    texts = [
        f"{name} {value!r}" for one in found for name, value in one.headers if name != "ce_dataref"
    ]
    run.written["headers of dead letters"] = "\n".join(texts)


STORED = """
SELECT concat_ws(' ', reason, error, traceback) FROM pipeline.backlog
UNION ALL SELECT concat_ws(' ', reason, error) FROM pipeline.outbox_rejected
"""
DEAD = len(FAILURES) + 4


async def everything(project: BakedProject, folder: Path) -> Run:
    """Let everything fail, and return what was written."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(outside())
        run = Run(project, folder, http)
        db = await stack.enter_async_context(prepared(run))
        setup = ["migrate"], ["topics", "create", "--partitions", "1"]
        await run.call("setting up", [({}, command) for command in setup])
        starts = asyncio.create_task(run.call("wrong starts", wrong_starts(run)))
        async with run.serving("log in JSON", "run"):
            port = await run.port("log in JSON", r"health and metrics on port (\d+)")
            await send(run, f"{run.topics}-scans")

            async def is_done() -> bool:
                dead = "SELECT count(*) FROM pipeline.backlog WHERE died_at IS NOT NULL"
                failed = "SELECT count(*) FROM pipeline.backlog WHERE reason = 'failed'"
                return bool(
                    (await db.fetchval(dead), await db.fetchval(failed)) == (DEAD, 3)
                    and "object store at s3" in run.written["log in JSON"]
                    and b"tell-webhook" in http.traces
                )

            await until(is_done, "all messages fail")
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                for path in ("/metrics", "/health/ready", "/health/live"):
                    run.written[path] = (await client.get(path)).text
        keys = [row["key"].hex() for row in await db.fetch("SELECT key FROM pipeline.backlog")]
        asked = [
            *(["status"], ["doctor"], ["dead", "list"], ["dead", "list", "--waiting"]),
            *(["dead", "events", "list"], ["inbox", "show", "1"], ["scheduled", "list"]),
            *(["dead", "show", key] for key in keys),
            *(["timeline", key] for key in ("payment-text", "invalid", "undecodable")),
        ]
        asked += [*([*one, "--json"] for one in asked), ["archive", "list"], ["claims", "sweep"]]
        await asyncio.gather(
            run.call("commands", [({}, command) for command in asked]),
            look_at_page(run, keys),
            look_at_records(run),
        )
        text = "log in text, with libraries"
        libraries = {"PIPELINE_LOG_LOGGERS": "httpx2,httpcore2,urllib3,aiokafka,asyncio"}
        async with run.serving(text, "run", **libraries, PIPELINE_LOG_JSON="false"):
            await db.execute("UPDATE pipeline.backlog SET due_at = now() WHERE reason = 'failed'")
            await run.until(text, "httpx2: HTTP Request: POST http", "object store at s3")
        await starts
        run.written["stored errors"] = "\n".join(row[0] for row in await db.fetch(STORED))
        run.written["spans"] = http.traces.decode("latin-1")
        run.written["what the outside has heard"] = "\n".join(http.heard)
        return run


@pytest.fixture(scope="module")
def run(default_project: BakedProject, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which everything has failed."""
    return asyncio.run(everything(default_project, tmp_path_factory.mktemp("secrets")))


HEARD = "what the outside has heard"
"""No output, but what proves that secrets were in use."""


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_in_nothing_that_is_written(run: Run, place: str) -> None:
    # What is no UTF-8 is shown in hexadecimal digits.
    ways = secret(place), secret(place).encode().hex()
    found = {
        name: text[max(0, text.index(way) - 200) :][:300]
        for name, text in run.written.items()
        for way in ways
        if way in text and name != HEARD
    }
    assert found == {}


@pytest.mark.parametrize(
    "place",
    [
        "path of the webhook",
        "query of the webhook",
        "key id of the object store",
        "session token of the object store",
        "header for the collector",
        "bearer token of a client",
    ],
)
def test_the_outside_has_got_its_secret(run: Run, place: str) -> None:
    assert secret(place) in run.written[HEARD]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("stored errors", "HTTPError: the webhook answered 500"),
        ("stored errors", "ReadTimeout"),
        ("stored errors", "RemoteProtocolError: Server disconnected"),
        ("stored errors", "ConnectError: All connection attempts failed"),
        ("stored errors", "'Authorization': 'Bearer **********'"),
        ("stored errors", "can't pay Paid(how='text', amount=0, pin=SecretStr('**********')"),
        ("stored errors", "ValidationError: number: Input should be a valid string"),
        ("stored errors", 'null value in column "place"'),
        ("stored errors", "invalid input syntax for type integer …"),
        ("stored errors", "how: Input should be a valid string"),
        ("stored errors", "Invalid JSON: EOF while parsing"),
        ("stored errors", "specversion is '0.3'"),
        ("stored errors", "elsewhere.example.org/k?X-Amz-Signature=**********"),
        ("log in JSON", '"logger": "parcel_tracker.paying", "message": "paying"'),
        ("log in JSON", "Task exception was never retrieved"),
        ("log in JSON", "object store at s3://parcels/claims: fetching failed"),
        ("log in JSON", "Failed to export metrics"),
        ("log in JSON", "Header format invalid"),
        ("log in text, with libraries", '/********** "HTTP/1.0 500'),
        ("spans", "/refused/**********"),
        ("spans", "exception.stacktrace"),
        ("headers of dead letters", "dead-letter-error"),
        ("/metrics", "pipeline_messages"),
        ("commands", "the object store at s3://parcels/archive"),
        ("commands", '"how": "text"'),
        ("commands", "arrived"),
        ("page /dead", "attempts used up"),
        ("page /timeline?key=payment-text", "arrived"),
        ("page after a login, 403", "The token is wrong"),
        ("wrong starts", "password authentication failed"),
        ("wrong starts", "Connection refused"),
        ("wrong starts", "write it as postgresql+asyncpg://user:password@host"),
        ("wrong starts", "no broker accepts the client"),
        ("wrong starts", "PIPELINE_BATCH_SIZE: Input should be a valid integer"),
        ("wrong starts", "LookupError: "),
    ],
)
def test_what_should_fail_has_failed_and_is_told(run: Run, output: str, text: str) -> None:
    assert text in run.written[output]


def test_libraries_that_nobody_has_named_are_heard_from_warnings_on(run: Run) -> None:
    lines = [json.loads(line) for line in run.written["log in JSON"].splitlines()]
    ours = ("onceward.", "parcel_tracker.")
    chatter = [
        one
        for one in lines
        if one["level"] in ("DEBUG", "INFO") and not one["logger"].startswith(ours)
    ]
    assert chatter == []
