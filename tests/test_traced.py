"""One scan through two generated services: its trace, and the picture of it in the docs."""

import asyncio
from pathlib import Path
from xml.etree import ElementTree

import pytest

from demo.traced import FIRST, PICTURE, SECOND, Span, trace_of_a_scan
from demo.waterfall import draw


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> list[Span]:
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
    return sorted(label for label in labels(picture) if label.startswith(("send ", "process ")))


def test_the_picture_in_the_docs_shows_the_spans_that_there_are(spans: list[Span]) -> None:
    drawn = draw("The trace of one scan", spans)
    assert len(shown(drawn)) == len(spans)
    assert shown(Path(PICTURE).read_text("utf-8")) == shown(drawn)
