"""One scan through two generated services: its trace, and the picture of it in the docs."""

import asyncio
import os
import re
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest
from opentelemetry.semconv.attributes import (
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
)

from demo.collector import SOURCE, collecting, find
from demo.processes import ProcessFailed
from demo.traced import FIRST, PICTURE, SECOND, SECRET, trace_of_a_scan
from demo.waterfall import Span, draw

from tests.baked import BakedProject

pytestmark = [pytest.mark.full, pytest.mark.integration]


@pytest.fixture(scope="module")
def collector() -> None:
    """Build it, once for all projects."""
    find()


@pytest.fixture(scope="module")
def spans(collector: None, tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
    # With servers of its own: other tests have services of these names, on other databases.
    with pytest.MonkeyPatch.context() as patch:
        for name in [one for one in os.environ if one.startswith("PIPELINE_")]:
            patch.delenv(name)
        return asyncio.run(trace_of_a_scan(tmp_path_factory.mktemp("traced")))


def the(spans: list[Span], name: str) -> Span:
    (found,) = [one for one in spans if name in (one.name, one.consumer)]
    return found


def attempts(spans: list[Span]) -> list[Span]:
    return [one for one in spans if one.consumer == "post-notice"]


def test_a_scan_is_one_trace_through_both_services(spans: list[Span]) -> None:
    sent, recorded = the(spans, "send scans"), the(spans, "record-scan")
    # The relays' spans are in traces of their own, and link to what they send.
    assert {one.trace_id for one in spans if one.consumer} == {sent.trace_id}
    assert (recorded.service, recorded.parent) == (FIRST, sent.id)
    assert {one.parent for one in attempts(spans)} == {recorded.id}
    assert {one.service for one in attempts(spans)} == {SECOND}


def test_a_call_to_the_outside_is_one_span_of_it(spans: list[Span]) -> None:
    call = the(spans, "tell-webhook")
    assert (call.parent, call.is_error) == (the(spans, "record-scan").id, False)
    request = the(spans, "POST")
    assert (request.service, request.parent, request.trace_id) == (FIRST, call.id, call.trace_id)


def test_a_request_to_the_outside_shows_where_it_goes_and_no_secret(spans: list[Span]) -> None:
    """With the names of today, which `OTEL_SEMCONV_STABILITY_OPT_IN` asks for by default."""
    shown = the(spans, "POST").attributes
    assert set(shown) == {
        http_attributes.HTTP_REQUEST_METHOD,
        http_attributes.HTTP_RESPONSE_STATUS_CODE,
        network_attributes.NETWORK_PEER_ADDRESS,
        network_attributes.NETWORK_PEER_PORT,
        network_attributes.NETWORK_PROTOCOL_VERSION,
        server_attributes.SERVER_ADDRESS,
        server_attributes.SERVER_PORT,
        url_attributes.URL_FULL,
    }
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\*+", shown[url_attributes.URL_FULL])
    assert SECRET not in str(spans)


def test_a_second_attempt_links_to_the_first(spans: list[Span]) -> None:
    first, second = attempts(spans)
    assert (first.links, first.is_error) == ((), True)
    assert (second.links, second.is_error) == ((first.id,), False)


def test_what_is_sent_links_to_what_has_staged_it(spans: list[Span]) -> None:
    assert the(spans, "send parcel-events").links == (the(spans, "record-scan").id,)
    scheduled, staged = the(spans, "send notices"), attempts(spans)[-1]
    assert scheduled.links == (staged.id,)
    assert scheduled.begin - staged.begin > 0.9e9, "it was published when it was due"


def labels(picture: str) -> list[str]:
    root = ElementTree.fromstring(picture)
    return [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]


def shown(picture: str) -> list[str]:
    kinds = ("send ", "process ", "POST")
    return sorted(label for label in labels(picture) if label.startswith(kinds))


def test_the_picture_in_the_docs_shows_the_spans_that_there_are(spans: list[Span]) -> None:
    drawn = draw("The trace of one scan", spans)
    assert len(shown(drawn)) == len(spans)
    assert shown(Path(PICTURE).read_text("utf-8")) == shown(drawn)


def configuration(project: BakedProject) -> str:
    return project.read("deploy/compose/collector.yaml")


def test_the_collector_is_of_the_version_that_a_service_is_deployed_with(
    default_project: BakedProject,
) -> None:
    deployed = re.findall(
        r"image: otel/opentelemetry-collector:(\S+)",
        default_project.read("deploy/compose.service.yaml"),
    )
    modules = (SOURCE / "go.mod").read_text("utf-8")
    assert re.findall(r"collector/otelcol v(\S+)", modules) == deployed


def test_a_collector_that_ends_is_missed_at_once(
    collector: None, default_project: BakedProject, tmp_path: Path
) -> None:
    async def killed() -> None:
        async with collecting(configuration(default_project), tmp_path) as running:
            assert list(running.requests()) == []
            os.kill(running.pid, signal.SIGKILL)
            while True:
                list(running.requests())
                await asyncio.sleep(0.01)

    with pytest.raises(ProcessFailed, match="ended by itself, with exit code -9"):
        asyncio.run(asyncio.wait_for(killed(), 60))


def test_a_collector_says_what_is_wrong_with_its_configuration(
    collector: None, tmp_path: Path
) -> None:
    async def wrong() -> None:
        async with collecting("receivers: {otpl: {}}", tmp_path):
            pass

    with pytest.raises(ProcessFailed, match=r"'receivers' unknown type: \"otpl\""):
        asyncio.run(wrong())
