"""The alerts on a service that runs: each is brought about, and ended as the runbook says."""

import json
import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
import typer
from aiokafka import AIOKafkaProducer
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import make_url
from typer.testing import CliRunner

from onceward.apply import inbox
from onceward.cli.commands import command_line
from onceward.retention.generations import close_generation
from onceward.schema import SHARDS

from .bank import ATTEMPTS, Bank
from .conftest import Command
from .grantees import Roles, grant, splitting
from .kafka_wire import Wire
from .outgoing import LARGE, OLD, allow, event, make_old_day, shares, stage, stage_long_ago
from .processes import starting
from .prometheus import ALERTS, TEXT, check, series, together
from .tcp_proxy import TcpProxy
from tests.contract.bank import Deposit
from tests.servers.processes import ROOT, Process, Start
from tests.servers.programs import program
from tests.servers.topics import following
from tests.servers.waiting import eventually

pytestmark = pytest.mark.full

RUNBOOK = (ROOT / "docs" / "runbook.md").read_text("utf-8")
INCIDENTS = (ROOT / "docs" / "incidents.md").read_text("utf-8")
OF_OPERATORS = ("runbook", "incidents", "monitoring", "dead-letters", "dead-events")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL))
SEEN_SOON = {"retention_interval": 0.2, "relay_lease": 1, "relay_topic_pause": 0.1}


@pytest.fixture
async def start(
    bank: Bank,
    database_url: str,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Start]:
    """Start processes of the bank that tell of everything at once."""
    monkeypatch.setenv("BANK_COUNTS", "0.1")
    async with starting(
        bank,
        database_url=database_url,
        kafka_bootstrap_servers=kafka,
        kafka_session_timeout=6,
        transaction_timeout=5,
        lock_timeout=2,
        **SEEN_SOON,
    ) as one:
        yield one


def app(bank: Bank) -> typer.Typer:
    """Return the command line of this bank."""
    found = command_line(bank.service)
    assert isinstance(found, typer.Typer)
    return found


async def scraped(process: Process) -> str:
    """Return what Prometheus gets of it."""
    return (await process.get("/metrics"))[1]


async def tells(process: Process, name: str, value: Callable[[float], bool], **labels: str) -> str:
    """Wait until all of these series have such a value, and there is one; returns the scrape."""
    found = [""]

    async def seen() -> bool:
        found[0] = await scraped(process)
        values = [
            number
            for (each, having), number in series(found[0]).items()
            if each == name and labels.items() <= dict(having).items()
        ]
        is_ready = re.search(r"^pipeline_ready\S* 1\.0$", found[0], re.MULTILINE)
        # What is over is over when all of it goes on again.
        return bool(values) and all(map(value, values)) and (value is not zero or bool(is_ready))

    await eventually(seen)
    return found[0]


async def works(process: Process) -> str:
    """Wait until a process that publishes is ready, with all shards; returns the scrape."""
    await tells(process, "pipeline_relay_shards", lambda shards: shards == SHARDS)
    return await tells(process, "pipeline_ready", positive)


def positive(number: float) -> bool:
    return number > 0


def zero(number: float) -> bool:
    return number == 0


def test_each_alert_has_its_section_in_the_runbook() -> None:
    assert list(SECTIONS) == ALERTS
    links = re.findall(r"docs/runbook\.md#(\w+)", TEXT)
    assert links == [name.lower() for name in ALERTS]
    for name, section in SECTIONS.items():
        assert re.findall(r"^\*\*(\w+):\*\*", section, re.MULTILINE) == ["Means", "Look", "Do"], (
            name
        )


def test_each_incident_has_the_parts_of_an_alerts_section() -> None:
    incidents = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", INCIDENTS, re.MULTILINE | re.DOTALL)
    assert len(incidents) == 4
    for name, section in incidents:
        parts = re.findall(r"^\*\*(\w+):\*\*", section, re.MULTILINE)
        assert parts[:3] == ["Means", "Look", "Do"], name


def test_the_commands_of_the_runbook_exist(bank: Bank) -> None:
    def is_known(line: str) -> bool:
        # Read to its end before the help is shown, and nothing is done.
        return CliRunner().invoke(app(bank), [*shlex.split(line), "--help"]).exit_code == 0

    lines = re.findall(r"^service (.+)$", RUNBOOK + INCIDENTS, re.MULTILINE)
    assert len(lines) > 20
    for line in lines:
        assert is_known(line), line
    assert not any(map(is_known, ["retention walk", "dead list --wating", "walk"]))


def test_the_rules_know_how_many_shards_there_are() -> None:
    (shards,) = re.findall(r"pipeline_relay_shards\{[^}]*\}\) < (\d+)", TEXT)
    assert int(shards) == SHARDS


def test_the_rules_pass_their_own_tests() -> None:
    done = subprocess.run(
        [program("promtool"), "test", "rules", "alerts_test.yaml"],
        cwd=ROOT / "deploy" / "prometheus",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = (ROOT / "deploy" / "prometheus" / "alerts_test.yaml").read_text("utf-8")
    for name in ALERTS:
        assert f"name: {name} fires\n" in tests
        assert f"name: {name} stays quiet\n" in tests


def test_every_alert_is_brought_about() -> None:
    here = Path(__file__).read_text("utf-8")
    firing = " ".join(re.findall(r"firing=\[([^]]*)\]", here))
    assert set(re.findall(r'"(\w+)"', firing)) == set(ALERTS)


DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text("utf-8"))


def panels() -> list[str]:
    """Return what the dashboard asks."""
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def chosen_from() -> set[str]:
    """Return the metrics by whose labels the dashboard lets people choose."""
    asked = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if "refresh" in one]
    found = [re.fullmatch(r"label_values\((\w+), job\)", one) for one in asked]
    return {one[1] for one in found if one}


def told_of() -> set[str]:
    """Return the metrics that pages name for whoever operates the service."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / f"{one}.md" for one in OF_OPERATORS)]
    text = "".join(one.read_text("utf-8") for one in pages)
    return set(re.findall(r"`((?:pipeline|messaging|db)_[a-z_]+)[`{=]", text)) - {
        "db_query_summary"
    }


OF_CALLS = {
    "pipeline_calls_under_way",
    *(f"pipeline_call_duration_seconds_{part}" for part in ("bucket", "count")),
}
"""Metrics that an optional package exposes."""


def queries() -> str:
    """Return all that the rules and the dashboard ask."""
    return "\n".join([*re.findall(r"expr: \|-\n(.*?)\n {8}\w", TEXT, re.DOTALL), *panels()])


def test_prometheus_can_read_what_the_dashboard_asks(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{place}", "expr": expression.replace("$__rate_interval", "5m")}
        for place, expression in enumerate(panels())
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), "utf-8")
    done = subprocess.run(
        [program("promtool"), "check", "rules", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_delays_are_shown_by_topic() -> None:
    (panel,) = [one for one in DASHBOARD["panels"] if one["title"] == "Delay, by stage"]
    by = {
        metric: (grouped, re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for target in panel["targets"]
        for grouped, metric in re.findall(r"max by \(([^)]*)\) \((\w+){", target["expr"])
    }
    assert len(by) == len(panel["targets"])
    topic = "messaging_destination_name"
    assert by == {
        metric: (topic, [topic])
        for metric in (
            "pipeline_consumer_delay_seconds",
            "pipeline_backlog_age_seconds",
            "pipeline_outbox_delay_seconds",
        )
    }


async def test_every_metric_and_label_in_rules_dashboard_and_pages_is_exposed(
    start: Start,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    missing: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    asked = queries()
    named = set(re.findall(r"(\w+)\{", asked)) - {"up", *OF_CALLS}  # of Prometheus, of effects
    labels = {
        (metric, label)
        for metric, chosen in re.findall(r"(\w+)\{([^}]*)\}", asked)
        for label in re.findall(r"(\w+)=", chosen)
        if label not in ("job", "instance") and metric not in OF_CALLS
    }
    by = {
        label
        for group in re.findall(r"by \(([^)]*)\)", asked)
        for label in group.replace(" ", "").split(",")
    } - {"job", "instance", "le"}
    process = await start("run", breaker_keys=2)
    for deposit in (Deposit(1), Deposit(1), Deposit(2, id="1"), Deposit(3, type="unheard")):
        await deposit.send(producer, bank.deposits)
    await eventually(lambda: db.fetchval("SELECT count(*) = 1 FROM pipeline.backlog"))
    await Deposit(7, account="early", failures=1).send(producer, bank.deposits)  # the backlog's
    await eventually(lambda: db.fetchval("SELECT count(*) = 2 FROM pipeline.inbox"))
    await db.execute(
        "UPDATE pipeline.inbox_generation SET since = clock_timestamp() - interval '1 day'"
    )
    compacted = await new_topic(**{"cleanup.policy": "compact"})  # takes nothing without a key
    await stage(db, [event(missing, 1), event(compacted, 2, None)])
    for outcome in ("waiting", "dead"):
        await tells(process, "pipeline_outbox_rejected", positive, pipeline_outcome=outcome)
    await db.execute(
        "INSERT INTO pipeline.throttle (kind, subject, per_second, who, why)"
        " VALUES ('topic', 'elsewhere', 0, 'ada', 'a test')"
    )
    await tells(process, "pipeline_throttle_age_seconds", positive)
    for amount in range(10, 16):
        await Deposit(amount, account=f"{amount}", failures=99).send(producer, bank.deposits)
    await tells(process, "pipeline_breaker_open", positive)
    await db.execute("ALTER TABLE pipeline.inbox_closed RENAME TO elsewhere")
    await tells(process, "pipeline_retention_failures_total", positive)
    # It is counted now and then only. A mismatch is no consumer's.
    await tells(process, "pipeline_backlog_dead", positive, pipeline_consumer="")

    families = list(text_string_to_metric_families(await scraped(process)))
    samples = [one for family in families for one in family.samples]
    # A histogram goes by the name of its family; no series has it.
    exposed = {one.name for one in samples} | {one.name for one in families}
    chosen = chosen_from()
    assert len(chosen) == 1
    assert chosen <= {one.name for one in samples if "job" not in one.labels}
    told = told_of()
    assert told
    assert told - exposed == set()
    assert named <= {one.name for one in samples}
    assert len(named) > 15
    polled = {one.name for one in samples if one.labels.get("messaging_operation_name") == "poll"}
    assert "messaging_client_consumed_messages_total" in polled
    assert "messaging_client_operation_duration_seconds_count" in polled
    for metric, label in labels:
        assert any(label in one.labels for one in samples if one.name == metric), (metric, label)
    assert by <= {label for one in samples for label in one.labels}


async def test_dead_letters_alert_until_they_are_redriven(
    start: Start,
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    tmp_path: Path,
) -> None:
    process = await start("run")
    await Deposit(1, failures=ATTEMPTS).send(producer, bank.deposits)
    await tells(process, "pipeline_ready", positive)
    fires = await tells(process, "pipeline_backlog_dead", positive)
    check(tmp_path, [fires], firing=["DeadLetters"], quiet=set(ALERTS) - {"DeadLetters"})
    assert "attempts used up" in (await command("dead", "list")).stdout
    redriven = await command("dead", "redrive", "--reason", "attempts used up", "--yes")
    assert redriven.exit_code == 0, redriven.output
    # Its row is gone when it has taken effect, and is not told of as the last thing that was seen.
    await tells(process, "pipeline_backlog_waiting", zero)
    over = await tells(process, "pipeline_backlog_dead", zero)
    check(tmp_path, [fires, over], quiet=ALERTS)


def calls(done: int, failed: int) -> str:
    """Return what a process exposes of its calls, in part; an optional package makes them."""
    name = (
        'pipeline_call_duration_seconds_count{{pipeline_consumer="pay",pipeline_outcome="{}"}} {}\n'
    )
    return "".join(name.format(*one) for one in (("done", done), ("failed", failed)))


def test_calls_that_fail_alert_until_most_succeed(tmp_path: Path) -> None:
    before, away, over = calls(10, 0), calls(10, 10), calls(110, 10)
    check(tmp_path, [before, away], firing=["CallsFailing"], minutes=8)
    check(tmp_path, [before, away, over], quiet=["CallsFailing"], minutes=8)
    check(tmp_path, [before, calls(30, 10)], quiet=["CallsFailing"], minutes=8)


def test_partitions_that_others_read_alert_until_the_service_reads_them(tmp_path: Path) -> None:
    all_of_them, half, none = (f"pipeline_partitions_assigned {one}\n" for one in (12, 6, 0))
    before = [all_of_them] * 3
    check(tmp_path, [*before, half], firing=["FewerPartitions"], minutes=18)
    check(tmp_path, [*before, half, all_of_them], quiet=["FewerPartitions"], minutes=18)
    check(tmp_path, [*before, none], quiet=["FewerPartitions"], minutes=18)


async def test_an_identity_mismatch_alerts_until_an_hour_after_the_last_one(
    start: Start,
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    process = await start("run")
    await Deposit(1).send(producer, bank.deposits)
    await Deposit(2, id="1").send(producer, bank.deposits)
    fires = await tells(process, "pipeline_backlog_dead", positive)
    check(tmp_path, ["", fires], firing=["IdentityMismatch"])
    found = (await command("dead", "list", "--reason", "identity mismatch")).stdout
    assert "identity mismatch" in found
    letter = found.splitlines()[1].split()[0]
    assert "mismatch" in (await command("dead", "show", letter)).stdout
    assert "1" in (await command("inbox", "show", "1")).stdout
    await Deposit(2, id="4712").send(producer, bank.deposits)
    await eventually(lambda: db.fetchval("SELECT balance = 3 FROM account"))
    because = ("--operator", "ada", "--because", "sent again as 4712")
    done = await command("dead", "discard", letter, *because, "--yes")
    assert done.exit_code == 0, done.output
    over = await tells(process, "pipeline_backlog_dead", zero)
    check(
        tmp_path, ["", fires, over], firing=["IdentityMismatch"], quiet=["DeadLetters"], minutes=45
    )
    check(tmp_path, ["", fires, over], quiet=ALERTS, minutes=75)


async def test_shards_without_a_relay_alert_until_one_runs(start: Start, tmp_path: Path) -> None:
    consumer = await start("consume")
    await eventually(consumer.is_ready)
    nobody = await scraped(consumer)
    check(tmp_path, [nobody], firing=["NoRelayOwner"], quiet=["ServiceDown", "NoConsumer"])
    relay = await start("relay")
    owned = await works(relay)
    over = together(await scraped(consumer), owned)
    check(tmp_path, [nobody, over], quiet=ALERTS)
    await relay.kill()
    check(tmp_path, [over, await scraped(consumer)], firing=["NoRelayOwner"])


async def test_a_pause_that_is_forgotten_alerts_until_it_is_resumed(
    start: Start, command: Command, bank: Bank, db: asyncpg.Connection, tmp_path: Path
) -> None:
    process = await start("run")
    because = "--because", "a test", "--yes"
    ends = await command("pause", "topic", bank.deposits, "--for", "7d", *because)
    assert ends.exit_code == 0, ends.output
    await db.execute("UPDATE pipeline.throttle SET since = now() - interval '2 h'")
    planned = await tells(process, "pipeline_throttle_rate", zero, pipeline_subject=bank.deposits)
    check(tmp_path, [planned], quiet=["Paused", "PartitionBlocked", "NotReady", "NoConsumer"])
    topic = "topic", bank.deposits
    for words, is_asked in ((("pause", *topic), zero), (("throttle", *topic, "20"), positive)):
        done = await command(*words, *because)
        assert done.exit_code == 0, done.output
        await tells(process, "pipeline_throttle_age_seconds", lambda age: age < 3_600)
        await tells(process, "pipeline_throttle_rate", is_asked)
        await db.execute("UPDATE pipeline.throttle SET since = now() - interval '2 h'")
        fires = await tells(process, "pipeline_throttle_age_seconds", lambda age: age > 3_600)
        check(tmp_path, [fires], firing=["Paused"], quiet=["PartitionBlocked", "NotReady"])
    assert f"topic {bank.deposits} throttled to 20/s, 2 h" in (await command("status")).stdout
    assert (await command("resume", "topic", bank.deposits)).exit_code == 0

    async def is_over() -> bool:
        found = {name for name, _ in series(await scraped(process))}
        return "pipeline_ready" in found and "pipeline_throttle_age_seconds" not in found

    await eventually(is_over)
    check(tmp_path, [fires, await scraped(process)], quiet=["Paused"])


async def test_topics_that_nobody_reads_alert_until_a_consumer_runs(
    start: Start, command: Command, bank: Bank, producer: AIOKafkaProducer, tmp_path: Path
) -> None:
    await Deposit(1).send(producer, bank.deposits)
    relay = await start("relay")
    nobody = await works(relay)
    check(tmp_path, [nobody], firing=["NoConsumer"], quiet=set(ALERTS) - {"NoConsumer"})
    read = f"reads +{bank.deposits}  lag {{}}, .*{{}}"
    assert re.search(read.format(1, "no reader"), (await command("status")).stdout)
    consumer = await start("consume")
    await tells(consumer, "pipeline_partitions_assigned", positive)
    reading = await tells(consumer, "pipeline_ready", positive)
    over = together(await scraped(relay), reading)
    check(tmp_path, [nobody, over], quiet=ALERTS)

    async def is_read() -> bool:
        return bool(re.search(read.format(0, "1 reader"), (await command("status")).stdout))

    await eventually(is_read)
    await consumer.kill()
    check(tmp_path, [over, await scraped(relay)], firing=["NoConsumer"])


async def test_records_that_wait_in_kafka_alert_until_they_are_applied(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection, tmp_path: Path
) -> None:
    await db.execute("ALTER TABLE account RENAME TO elsewhere")
    written = int((datetime.now(UTC) - timedelta(minutes=20)).timestamp() * 1_000)
    for amount in range(6):
        one = Deposit(amount, account=f"{amount}", timestamp=written)
        await one.send(producer, bank.deposits)
    process = await start("run", breaker_keys=2, retry_pause=0.2)
    fires = await tells(process, "pipeline_consumer_delay_seconds", lambda delay: delay > 1_000)
    check(tmp_path, [fires], firing=["ConsumerDelay"])
    await db.execute("ALTER TABLE elsewhere RENAME TO account")
    over = await tells(process, "pipeline_consumer_delay_seconds", zero)
    check(tmp_path, [fires, over], quiet=["ConsumerDelay"])


async def test_the_hot_key_of_a_partition_is_found_as_the_page_says(
    start: Start, bank: Bank, producer: AIOKafkaProducer, db: asyncpg.Connection
) -> None:
    await start("consume")
    for amount, account in enumerate(("hot", "hot", "hot", "cold", "\xe9")):
        await Deposit(amount, account=account).send(producer, bank.deposits)
    await eventually(lambda: db.fetchval("SELECT count(*) = 5 FROM pipeline.inbox"))
    query, of_release = re.findall(r"```sql\n(SELECT .*?)```", INCIDENTS, re.DOTALL)
    assert await db.fetch(of_release) == []
    here = query.replace("'scans'", f"'{bank.deposits}'").replace("partition = 3", "partition = 0")
    first, *others = await db.fetch(here)
    assert tuple(first) == ("hot", 3)
    assert len(others) == 2


async def test_a_service_without_running_processes_alerts_until_one_is_started(
    start: Start, bank: Bank, tmp_path: Path
) -> None:
    process = await start("run")
    before = await works(process)
    await process.kill()
    wrong = {"dead_letter_topic": bank.deposits}  # it would read what it gives up
    refused, doctor = await start("run", **wrong), await start("doctor", **wrong)
    assert await refused.ended() == 1
    assert await doctor.ended() == 1
    why = "PIPELINE_DEAD_LETTER_TOPIC"
    assert why in refused.output.splitlines()[-1]
    assert re.search(f"wrong +settings +.*{why}", doctor.output)
    check(tmp_path, [before, ""], firing=["ServiceDown", "NoConsumer", "NoRelayOwner"])
    process = await start("run")
    await tells(process, "pipeline_partitions_assigned", positive)
    over = await works(process)
    check(tmp_path, [before, "", over], quiet=ALERTS)


async def test_a_process_that_waits_for_a_server_alerts_until_it_is_back(
    start: Start, kafka: str, tmp_path: Path
) -> None:
    async with Wire(kafka).listening() as wire:
        wire.shut()
        process = await start("run", kafka_bootstrap_servers=wire.address)
        fires = await tells(process, "pipeline_ready", lambda is_ready: is_ready == 0)

        async def is_named() -> bool:
            return f"Kafka at {wire.address}" in str(await process.reasons())

        await eventually(is_named)
        check(tmp_path, [fires], firing=["NotReady"], quiet=["ServiceDown"])
        doctor = await start("doctor", kafka_bootstrap_servers=wire.address)
        assert await doctor.ended() == 1
        assert re.search(f"wrong +kafka +Kafka at {wire.address}: ", doctor.output)
        wire.go_on()
        await tells(process, "pipeline_partitions_assigned", positive)
        over = await works(process)
        check(tmp_path, [fires, over], quiet=ALERTS)


async def test_events_that_kafka_refuses_alert_until_their_topic_is_there(
    start: Start,
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    tmp_path: Path,
    missing: str,
) -> None:
    bank.balances = missing  # for the processes, which declare it
    process = await start("run")
    await Deposit(1).send(producer, bank.deposits)
    waits = {"pipeline_outcome": "waiting"}
    fires = await tells(process, "pipeline_outbox_rejected", positive, **waits)
    check(tmp_path, [fires], firing=["EventsRejected"], quiet=["DeadEvents"])
    found = await command("dead", "events", "list", "--waiting", "--summary")
    assert "topic missing" in found.stdout
    create = await start("topics", "create", "--partitions", "8")
    assert await create.ended() == 0, create.output
    assert f"{missing}: created with 8 partitions" in create.output
    over = await tells(process, "pipeline_outbox_rejected", zero, **waits)
    check(tmp_path, [fires, over], quiet=ALERTS)


async def test_events_for_an_unauthorized_topic_alert_until_writing_is_allowed(
    start: Start,
    command: Command,
    db: asyncpg.Connection,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
    tmp_path: Path,
) -> None:
    topic = await new_topic()
    async with Wire(kafka).listening() as wire:
        wire.forbid(topic)
        process = await start("run", kafka_bootstrap_servers=wire.address)
        await stage(db, [event(topic, 1)])
        waits = {"pipeline_outcome": "waiting"}
        fires = await tells(process, "pipeline_outbox_rejected", positive, **waits)
        check(tmp_path, [fires], firing=["EventsRejected"], quiet=["DeadEvents"])
        found = await command("dead", "events", "list", "--waiting", "--summary")
        assert "topic not allowed" in found.stdout
        wire.go_on()
        over = await tells(process, "pipeline_outbox_rejected", zero, **waits)
        check(tmp_path, [fires, over], quiet=ALERTS)


async def test_rounds_of_retention_that_fail_alert(
    start: Start, command: Command, db: asyncpg.Connection, tmp_path: Path
) -> None:
    process = await start("run")
    before = await tells(process, "pipeline_retention_held", zero)
    await db.execute("ALTER TABLE pipeline.inbox_closed RENAME TO elsewhere")
    failed = await tells(process, "pipeline_retention_failures_total", positive)
    check(tmp_path, [before, failed], quiet=["RetentionFailing"], minutes=100)
    age = "UPDATE pipeline.retention_round SET finished_at = finished_at - interval '7 hours'"
    await db.execute(age)
    old = await tells(process, "pipeline_retention_age_seconds", lambda age: age > 6 * 3_600)
    check(tmp_path, [old, old], firing=["RetentionFailing"], minutes=100)
    assert (await command("retention", "run")).exit_code != 0
    await db.execute("ALTER TABLE pipeline.elsewhere RENAME TO inbox_closed")
    done = await command("retention", "run")
    assert done.exit_code == 0, done.output
    over = await tells(process, "pipeline_retention_age_seconds", lambda age: age < 60)
    check(tmp_path, [old, over], quiet=ALERTS, minutes=400)


async def test_a_consumer_that_fails_for_whatever_comes_alerts_until_it_succeeds(
    start: Start,
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    await db.execute("ALTER TABLE account RENAME TO elsewhere")
    for amount in range(6):
        await Deposit(amount, account=f"{amount}").send(producer, bank.deposits)
    process = await start("run", breaker_keys=2, retry_pause=0.2)
    await tells(process, "pipeline_breaker_open", positive)
    # What failed before it opened waits in the backlog, and now has done so for long.
    await db.execute("UPDATE pipeline.backlog SET received_at = received_at - interval '2 hours'")
    await tells(process, "pipeline_backlog_age_seconds", lambda age: age > 7_200)
    fires = await tells(process, "pipeline_partitions_blocked", positive)
    check(tmp_path, [fires], firing=["BreakerOpen", "PartitionBlocked", "BacklogAge"])
    reasons = await process.reasons()
    assert "breaker of deposit" in reasons
    waiting = await command("dead", "list", "--waiting", "--summary")
    assert "failed" in waiting.stdout
    await db.execute("ALTER TABLE elsewhere RENAME TO account")
    await tells(process, "pipeline_breaker_open", zero)
    await tells(process, "pipeline_backlog_age_seconds", zero)
    over = await tells(process, "pipeline_partitions_blocked", zero)
    check(tmp_path, [fires, over], quiet=["BreakerOpen", "PartitionBlocked", "BacklogAge"])
    await eventually(lambda: db.fetchval("SELECT count(*) = 6 FROM account"))


async def test_a_position_missing_from_its_topic_alerts_until_it_is_moved(
    start: Start,
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    process = await start("run")
    await Deposit(1).send(producer, bank.deposits)
    await eventually(lambda: db.fetchval("SELECT count(*) = 1 FROM account"))
    await process.kill()
    # As after the topic was made anew, with fewer records.
    await db.execute("UPDATE pipeline.position SET next_offset = 1000")
    process = await start("run", retry_pause=0.2)
    fires = await tells(process, "pipeline_partitions_blocked", positive)
    check(tmp_path, [fires], firing=["PartitionBlocked"], quiet=["BreakerOpen"])
    assert "topic changed" in str(await process.reasons())
    seek = ("topics", "seek", bank.deposits, "--partition", "0", "--to", "earliest")
    assert (await command(*seek, "--dry-run")).exit_code == 0
    done = await command(*seek)
    assert done.exit_code == 0, done.output
    await Deposit(2).send(producer, bank.deposits)
    over = await tells(process, "pipeline_partitions_blocked", zero)
    check(tmp_path, [fires, over], quiet=ALERTS)
    await eventually(lambda: db.fetchval("SELECT balance = 3 FROM account"))


async def test_unaccepted_events_alert_and_hold_their_day_until_kafka_accepts_them(
    start: Start,
    command: Command,
    bank: Bank,
    db: asyncpg.Connection,
    kafka: str,
    tmp_path: Path,
) -> None:
    await make_old_day(db)
    await stage_long_ago(db, 1, bank.balances)
    async with Wire(kafka).listening() as wire:
        wire.hold()
        process = await start("run", kafka_bootstrap_servers=wire.address)
        await tells(process, "pipeline_outbox_lag_duration_seconds", positive)
        fires = await tells(process, "pipeline_retention_held", positive)
        check(tmp_path, [fires], firing=["OutboxLag", "NotReady"], quiet=["RetentionHeld"])
        check(tmp_path, [fires], firing=["OutboxLag", "RetentionHeld"], minutes=25 * 60)
        held = (await command("retention", "status")).stdout
        assert "relay has not published" in " ".join(held.split())
        assert (await command("retention", "run")).exit_code == 0
        assert OLD in (await command("retention", "status")).stdout
        wire.go_on()
        await tells(process, "pipeline_outbox_lag_duration_seconds", zero)
        await tells(process, "pipeline_retention_held", zero)
        # Its session may have expired meanwhile: then it joins its group again.
        await tells(process, "pipeline_partitions_assigned", positive)
        over = await tells(process, "pipeline_retention_held", zero)
        check(tmp_path, [fires, over], quiet=ALERTS)
        assert OLD not in (await command("retention", "status")).stdout


async def test_a_disconnected_relay_stops_reporting_shards_that_another_took_over(
    start: Start,
    bank: Bank,
    db: asyncpg.Connection,
    database_url: str,
    kafka: str,
    missing: str,
    tmp_path: Path,
) -> None:
    await stage(db, [event(missing, 1)])
    url = make_url(database_url)
    async with (
        TcpProxy("127.0.0.1", url.port or 0).listening() as proxy,
        Wire(kafka).listening() as wire,
    ):
        cut_off = await start(
            "relay",
            database_url=url.set(port=proxy.port).render_as_string(hide_password=False),
            kafka_bootstrap_servers=wire.address,
        )
        await tells(cut_off, "pipeline_outbox_rejected", positive, pipeline_outcome="waiting")
        wire.hold()
        async with db.transaction():  # or the day would be dropped before it has an event
            await make_old_day(db)
            await stage_long_ago(db, 2, bank.balances)
        fires = await tells(cut_off, "pipeline_outbox_lag_duration_seconds", lambda lag: lag > 300)
        check(tmp_path, [fires], firing=["OutboxLag", "EventsRejected"])
        proxy.shut()
        other = await start("relay")
        await tells(other, "pipeline_outbox_rejected", positive, pipeline_outcome="waiting")
        # An event waits for its topic, so no process is ready.
        await tells(other, "pipeline_outbox_lag_duration_seconds", lambda lag: lag == 0)

        async def is_silent() -> bool:
            scrape = await scraped(cut_off)
            return "pipeline_relay_shards" in scrape and "pipeline_outbox_lag_" not in scrape

        await eventually(is_silent)
        over = await scraped(cut_off)
        assert "pipeline_outbox_rejected" not in over
        check(tmp_path, [fires, over], quiet=["OutboxLag", "EventsRejected"])
        proxy.restore()
        wire.go_on()
        # It is given a share again, and tells of that.
        await tells(cut_off, "pipeline_outbox_lag_duration_seconds", lambda lag: lag == 0)


async def test_outbox_lag_alerts_until_a_second_relay_shares_the_shards(
    start: Start,
    bank: Bank,
    db: asyncpg.Connection,
    kafka: str,
    tmp_path: Path,
) -> None:
    await make_old_day(db)
    for number in range(16):
        await stage_long_ago(db, number, bank.balances, key=f"{number}")
    async with Wire(kafka).listening() as wire, following(kafka, bank.balances) as told:
        wire.hold()

        async def let_one_through() -> None:
            await eventually(lambda: wire.held > 0)
            wire.go_on()
            wire.hold()

        first = await start("run", kafka_bootstrap_servers=wire.address, relay_batch_events=1)
        await let_one_through()
        await eventually(lambda: len(told.records) == 1)
        fires = await tells(first, "pipeline_outbox_lag_duration_seconds", positive)
        check(tmp_path, [fires], firing=["OutboxLag"], quiet=["NoRelayOwner"])
        second = await start("relay")
        await eventually(lambda: db.fetchval("SELECT count(*) = 2 FROM pipeline.outbox_relay"))
        passed = 1
        while await shares(db) != [SHARDS // 2] * 2 or len(told.records) < 16:
            passed += wire.held
            wire.go_on()
            wire.hold()
            await eventually(lambda: wire.held > 0 or len(told.records) == 16)
        assert passed < 16
        halves = [
            await tells(one, "pipeline_outbox_lag_duration_seconds", zero)
            for one in (first, second)
        ]
        check(tmp_path, [fires, together(*halves)], quiet=ALERTS)


async def test_what_was_handled_before_alerts_while_it_comes_again(
    start: Start,
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    tmp_path: Path,
) -> None:
    process = await start("run")
    await tells(process, "pipeline_ready", positive)

    async def again(times: int) -> str:
        for amount in range(1, 6):
            await Deposit(amount).send(producer, bank.deposits)
        return await tells(
            process,
            "pipeline_messages_total",
            lambda count: count >= 5 * times,
            pipeline_outcome="duplicate",
        )

    for amount in range(1, 6):
        await Deposit(amount).send(producer, bank.deposits)
    scrapes = [
        await tells(process, "pipeline_messages_total", positive, pipeline_outcome="applied")
    ]
    scrapes += [await again(times) for times in range(1, 6)]
    check(tmp_path, scrapes[:2], quiet=["DuplicateRate"], minutes=10)
    check(tmp_path, scrapes, firing=["DuplicateRate"], minutes=1)
    check(tmp_path, scrapes, quiet=ALERTS, minutes=60)
    assert "applied" in (await command("inbox", "show", "1")).stdout


async def test_events_that_are_dead_alert_until_they_are_redriven(
    start: Start,
    command: Command,
    db: asyncpg.Connection,
    tmp_path: Path,
    kafka: str,
    new_topic: Callable[..., Awaitable[str]],
) -> None:
    topic = await new_topic(**{"max.message.bytes": "4000"})
    process = await start("run", relay_compression="none")
    await stage(db, [event(topic, 1, payload=LARGE)])
    dead = {"pipeline_outcome": "dead"}
    fires = await tells(process, "pipeline_outbox_rejected", positive, **dead)
    check(tmp_path, [fires], firing=["DeadEvents"], quiet=["EventsRejected"])
    assert "too large" in (await command("dead", "events", "list", "--summary")).stdout
    await allow(kafka, topic, 100_000)
    done = await command("dead", "events", "redrive", "--reason", "too large", "--yes")
    assert done.exit_code == 0, done.output
    over = await tells(process, "pipeline_outbox_rejected", zero)
    check(tmp_path, [fires, over], quiet=ALERTS)


@pytest.fixture
async def granted(server_url: str, direct_url: str, db: asyncpg.Connection) -> AsyncIterator[Roles]:
    """Roles of their own for the service and its retention."""
    async with splitting(server_url, direct_url, db) as made:
        yield made


async def test_too_few_days_ahead_alert_until_retention_is_run(
    granted: Roles, start: Start, db: asyncpg.Connection, tmp_path: Path
) -> None:
    both = {"relay": granted.names["service"]}
    await grant(granted.of("owner"), granted.parts | both)
    days = "SELECT relname FROM pg_class WHERE relname ~ '^outbox_p[0-9]{8}$' ORDER BY 1 OFFSET 1"
    for row in await db.fetch(days):
        await db.execute(f"DROP TABLE pipeline.{row['relname']}")
    process = await start("run", database_url=granted.of("service"))
    fires = await tells(process, "pipeline_outbox_ahead_seconds", positive)
    check(tmp_path, [fires], firing=["NoPartitionAhead"])
    await process.says("cannot create future partitions of the outbox: role")
    async with db.transaction():
        await db.execute("LOCK TABLE pipeline.outbox IN SHARE UPDATE EXCLUSIVE MODE")
        held = await start("retention", "run", database_url=granted.of("retention"))
        assert await held.ended() == 1
        assert "lock timeout" in held.output.splitlines()[-1]
    done = await start("retention", "run", database_url=granted.of("retention"))
    assert await done.ended() == 0, done.output
    await tells(process, "pipeline_outbox_ahead_seconds", lambda left: left > 6 * 86_400)
    over = await works(process)
    check(tmp_path, [fires, over], quiet=ALERTS)


async def test_too_short_a_memory_alerts_until_it_has_grown(
    start: Start,
    command: Command,
    bank: Bank,
    producer: AIOKafkaProducer,
    db: asyncpg.Connection,
    tmp_path: Path,
) -> None:
    async def age(generation: int) -> None:
        """Close it, as if that had been three hours ago."""
        assert await close_generation(db, current=generation)
        await db.execute(
            "UPDATE pipeline.inbox_closed SET closed_at = closed_at - interval '3 hours'"
            " WHERE generation = $1",
            generation,
        )

    first = await db.fetchval("SELECT current FROM pipeline.inbox_generation")
    await inbox.register(db, bank.handlers.consumers)
    await age(first)
    process = await start("run", inbox_age=7_200)
    fires = await tells(process, "pipeline_inbox_coverage_seconds", positive)
    check(tmp_path, [fires], firing=["InboxCoverageShort"], quiet=["NoPartitionAhead"])
    long_ago = datetime.now(UTC) - timedelta(days=1)
    old = Deposit(1, timestamp=int(long_ago.timestamp() * 1_000))
    await old.send(producer, bank.deposits)
    await tells(process, "pipeline_backlog_dead", positive)
    assert "too old" in (await command("dead", "list", "--reason", "too old", "--summary")).stdout
    assert "inbox_g" in (await command("retention", "status")).stdout
    given_up = ("dead", "discard", "--reason", "too old", "--because", "refunded", "--yes")
    assert (await command(*given_up)).exit_code == 0
    await process.kill()

    memory = "SELECT oldest, since FROM pipeline.inbox_generation"
    before = await db.fetchrow(memory)
    await age(first + 1)
    now = await db.fetchval("SELECT clock_timestamp()")
    process = await start("run")
    finished = "SELECT finished_at > $1 FROM pipeline.retention_round"
    await eventually(lambda: db.fetchval(finished, now))
    assert await db.fetchrow(memory) == before, "what is forgotten stays so, and nothing else goes"
    grows = await tells(process, "pipeline_inbox_coverage_seconds", positive)
    check(tmp_path, [grows], firing=["InboxCoverageShort"])
    # A week later.
    await db.execute("UPDATE pipeline.inbox_generation SET since = since - interval '7 days'")
    week = 7 * 86_400
    await tells(process, "pipeline_inbox_coverage_seconds", lambda far: far > week)
    over = await works(process)
    check(tmp_path, [grows, over], quiet=ALERTS)
