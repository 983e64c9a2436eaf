"""At its start a service says whether it remembers for as long as its topics can send again."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from onceward.consume import inbox_coverage
from onceward.consume.inbox_coverage import RemembersTooLittle
from onceward.observe.health import Health
from onceward.runtime import Part, serve
from onceward.settings import Settings

from .bank import Bank
from tests.conftest import Running
from tests.servers.topics import create_topic
from tests.servers.waiting import PATIENCE, eventually

Choose = Callable[..., Settings]

DAY = 86_400_000


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what was warned of."""
    caplog.set_level(logging.INFO, "onceward.consume.inbox_coverage")
    return lambda: [
        one.getMessage() for one in caplog.records if one.name == "onceward.consume.inbox_coverage"
    ]


@pytest.mark.parametrize(
    ("configs", "complaint"),
    [
        ({"retention.ms": str(7 * DAY)}, None),
        (
            {"retention.ms": str(9 * DAY)},
            "keeps records for 9.0 days, and the inbox remembers for 8.0",
        ),
        ({"retention.ms": "-1"}, "keeps records for ever"),
        ({"retention.ms": str(7 * DAY), "cleanup.policy": "compact"}, "keeps records for ever"),
        ({"retention.ms": str(7 * DAY), "cleanup.policy": "compact,delete"}, None),
    ],
)
async def test_a_topic_that_keeps_records_for_longer_is_told_of(
    kafka: str,
    missing: str,
    settings: Choose,
    told: Callable[[], list[str]],
    configs: dict[str, str],
    complaint: str | None,
) -> None:
    """Trap 10."""
    await create_topic(kafka, missing, 1, **configs)
    await inbox_coverage.check(settings(), [missing])
    if complaint is None:
        assert told() == []
        return
    (text,) = told()
    assert f"{missing} {complaint}" in text
    with pytest.raises(RemembersTooLittle, match="PIPELINE_INBOX_MUST_COVER_TOPICS"):
        await inbox_coverage.check(settings(inbox_must_cover_topics=True), [missing])


async def test_a_missing_topic_and_unavailable_brokers_are_not_an_error(
    missing: str, settings: Choose, told: Callable[[], list[str]], unused_tcp_port: int
) -> None:
    await inbox_coverage.check(settings(inbox_must_cover_topics=True), [missing])
    assert told() == []
    away = settings(
        kafka_bootstrap_servers=f"127.0.0.1:{unused_tcp_port}", inbox_must_cover_topics=True
    )
    await inbox_coverage.check(away, [missing])
    assert "is not known" in told()[0]


async def test_a_service_that_must_cover_its_topics_does_not_start(
    kafka: str, unborn: Bank, settings: Choose, running: Running
) -> None:
    await create_topic(kafka, unborn.deposits, 1, **{"retention.ms": "-1"})
    chosen = settings(inbox_must_cover_topics=True)
    health, stopping = Health(stall_after=3_600), asyncio.Event()
    serving = serve(unborn.service, chosen, Part.CONSUME, health=health, stopping=stopping)
    with pytest.raises(RemembersTooLittle, match="for ever"):
        await asyncio.wait_for(serving, PATIENCE)
    async with running(unborn.service, Part.RELAY, inbox_must_cover_topics=True) as health:
        await eventually(lambda: not health.reasons)


async def test_a_service_is_not_ready_before_it_has_compared_them(
    unborn: Bank, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def hold(*_: object) -> None:
        asked.set()
        await go_on.wait()

    monkeypatch.setattr(inbox_coverage, "check", hold)
    async with running(unborn.service, Part.CONSUME) as health:
        await asked.wait()
        assert "the retention of its topics" in health.reasons["consumer"]
        go_on.set()
        await eventually(lambda: "is not checked yet" not in health.reasons.get("consumer", ""))
