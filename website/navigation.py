"""The pages of the site by what their readers do, and what each is about."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RAW = "<<cookiecutter.service_name>>"
"""The folder of the service in the template."""
NAME = "Onceward"
SUMMARY = (
    "A cookiecutter template for asyncio services that consume from Apache Kafka, change PostgreSQL"
    " and publish to Kafka, with an inbox and an outbox in one transaction."
)
HOME = "index"


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the site."""

    name: str
    """Its path on the site, without a suffix."""
    subject: str
    """What it is about, in a few words."""
    source: str | None = None
    """Its file in the repository, or the folder that it lists; None: it is generated."""


def _template(name: str, subject: str) -> Page:
    return Page(name, subject, f"docs/{name}.md")


def _service(name: str, subject: str) -> Page:
    return Page(name, subject, f"{RAW}/docs/{name}.md")


def _decisions() -> Iterator[Page]:
    for file in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        heading = title(file.read_text("utf-8"))
        yield Page(f"decisions/{file.stem}", heading, f"docs/decisions/{file.name}")


def title(text: str) -> str:
    """Return the first heading of a page. Raises `ValueError` if it does not begin with one."""
    mark, _, heading = text.partition("\n")[0].partition(" ")
    if mark != "#":
        raise ValueError(f"a page begins with its title, and not with {text[:40]!r}")
    return heading


SECTIONS: dict[str, list[Page]] = {
    "Build": [
        _template("tutorial", "ten minutes: generate a service, send a message, add a handler"),
        _service("how-it-works", "the ideas, and the way of a message"),
        _service("delivery-guarantees", "what is once, what can repeat, what is in order"),
        _service("handlers", "registration, transaction, rows, sessions, batches"),
        _service("shared-rows", "accounts, stock, counters: rows that many messages change"),
        _service("retries", "exceptions, policies, timeouts"),
        _service("failures", "when messages fail: steps, use of attempts, crashes of the process"),
        _service("testing", "the fixture `harness`: time, crashes, every order of messages"),
        _service("codecs", "topics without CloudEvents, or with another form of them"),
        _service("debezium-input", "Debezium as input: another service's outbox, rows of tables"),
        _service("contracts", "schemas, AsyncAPI, changing an event safely"),
        _service("schema-registry", "topics in Avro, Protobuf or JSON Schema"),
        _service("sequences", "events in the order of their rows; lost and reordered ones"),
        _service("writer", "rows and events changed by an HTTP API, a script or a job"),
        _service("existing-database", "handlers that change tables of another application"),
        _service("http", "requests with an idempotency key, in the same transactions"),
        _service("scheduling", "events that are published later, unless they are cancelled"),
        _service("outside", "HTTP and other requests, after the commit"),
        _service("sagas", "a process of several steps: order, stock, payment, compensation"),
        _service("claims", "payloads that are too large for Kafka"),
        _service("personal-data", "encrypting fields with a key for each person"),
        _service("payments-example", "the worked example with accounts and payments, explained"),
    ],
    "Deploy": [
        _service("checklist", "before production: Kafka, PostgreSQL, handlers, operation"),
        _service("deploying", "image, Compose, Kubernetes"),
        _service("scaling", "processes, partitions, connections"),
        _template("capacity", "processes, partitions, connections, disk; cells"),
        _template("cells", "a service on two databases, each for half of the keys: an example"),
        _template(
            "managed-databases", "PostgreSQL of clouds, and poolers: what works, and why not"
        ),
        _service("releases", "migration and rollout, return to an earlier image, stopping"),
        _service("updating", "newer versions of the template, other answers"),
        _service("security", "TLS, passwords, secrets, roles of the database"),
        _service("cloud-login", "tokens and expiring passwords: OIDC, AWS, Azure, Google"),
        _service("debezium", "Debezium as output: the outbox published by Kafka Connect"),
    ],
    "Operate": [
        _service("monitoring", "alerts, metrics, log, a topic of dead letters, readiness"),
        _service("runbook", "causes and remedies for each alert"),
        _service("incidents", "a hot key, a wrong release, a full disk, a restored database"),
        _service("stopping", "pausing and resuming topics, consumers, events, keys"),
        _service("dead-letters", "commands; the breaker"),
        _service("dead-events", "events that Kafka rejects, and their commands"),
        _service("erasure", "deleting a person's data, and what is not deleted"),
        _service("history", "what happened to a key, what a release did; corrections"),
        _service("operations-page", "the state of the service and its dead letters in a browser"),
        _service("replay", "reading a topic again; new and renamed consumers"),
        _service("retention", "what is kept, and for how long"),
        _service("archive", "days of the outbox in an object store"),
    ],
    "Reference": [
        Page("commands", "every command of `service`, with its options"),
        Page("settings", "every environment variable", f"{RAW}/docs/settings.md"),
        Page("metrics", "every metric, with its name in Prometheus"),
        Page("api/service", "what is declared, and what a handler gets"),
        Page("api/rows", "bases and mixins of your tables"),
        Page("api/events", "what is consumed and published, and its form in Kafka"),
        Page("api/writer", "changes that no message causes"),
        Page("api/errors", "exceptions that your code raises or catches"),
        Page("api/testing", "the fixture `harness`, and what a test sees"),
        Page("api/optional", "calls to the outside, schema registry, archive, large payloads"),
        _service("reasons", "why a message is dead or waits, and why an event does"),
        _service("protocol", "the exact rules of messages: locks, states, lanes"),
        _service("protocol-failures", "the exact rules of failures: which message is at fault"),
        _service("protocol-relay", "the exact rules of events: window, leases, days"),
        _service("glossary", "the words of these pages, of the commands and of the log"),
    ],
    "Project": [
        _template("faq", "exactly once, DLQ, backfill, REST, GDPR, Redpanda, Windows, macOS"),
        _template("comparison", "other products: what they promise, and what each does better"),
        _template("limits", "no promise, not tested, or rejected as a design"),
        _template("how-it-is-tested", "instruments, and the tests of each promise"),
        _template("crash-matrix", "a process killed at every kind of request"),
        _template("model", "every interleaving of the protocol, searched by a model checker"),
        _template("chaos", "everything broken at once, and every message checked"),
        _template("performance", "what a message costs; rates, latency, failing messages, growth"),
        _template("measures", "`make bench`: contestants, measures, goals; instructions"),
        _template("traces", "one message through two services, as a trace"),
        _template("contributing", "tests, releases, programs that are needed"),
        _template("support", "versions that get fixes; questions, faults"),
        Page("security-policy", "how to report a vulnerability", "SECURITY.md"),
        Page("changes", "the changes of each version", "CHANGELOG.md"),
        Page("decisions/index", "why it is as it is, with what was measured", "docs/decisions"),
        *_decisions(),
    ],
}


def pages() -> Iterator[Page]:
    """Yield all pages but the first, in their order."""
    for section in SECTIONS.values():
        yield from section


def sources() -> dict[str, str]:
    """Return the names of the pages by their files in the repository, the first page's too."""
    return {"README.md": HOME} | {page.source: page.name for page in pages() if page.source}


def unlisted() -> list[str]:
    """Return the files that should be pages of the site, and are in no section."""
    files = [*ROOT.glob("docs/**/*.md"), *(ROOT / RAW / "docs").rglob("*.md")]
    return sorted({file.relative_to(ROOT).as_posix() for file in files} - set(sources()))
