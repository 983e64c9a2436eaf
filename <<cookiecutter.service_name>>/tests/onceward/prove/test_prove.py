"""Handlers that are wrong are found, and one that is right is proved."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest

from onceward.prove.evidence import as_evidence
from onceward.prove.proof import CanNotProve, interleaved, key_of, load
from onceward.prove.report import write
from onceward.prove.run import Difference, Result, differences
from onceward.testing.records import record

from tests.servers.databases import HOME
from tests.servers.processes import environment

SHOP = Path(__file__).with_name("shop.py")
TWO_MINUTES = 120.0

Prove = Callable[[str], Awaitable[tuple[int, str, dict[str, Any]]]]


@pytest.fixture
def prove(server_url: str, kafka: str, tmp_path: Path, used_topics: list[str]) -> Prove:
    """Prove the shop, wrong in a way; returns exit code, output and report."""

    async def run(wrong: str) -> tuple[int, str, dict[str, Any]]:
        sales, stock = (f"test-{uuid4().hex[:12]}" for _ in range(2))
        used_topics.extend((sales, stock))
        variables = {"SHOP_WRONG": wrong, "SHOP_SALES": sales, "SHOP_STOCK": stock}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "onceward.prove", str(SHOP)),
            *("--output", str(tmp_path), "--shrink", "0"),
            cwd=HOME,
            env=environment(variables, database_url=server_url, kafka_bootstrap_servers=kafka),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(TWO_MINUTES):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        print(text := output.decode())
        report = tmp_path / "report.json"
        found = json.loads(report.read_text()) if report.exists() else {}
        return process.returncode or 0, text, found

    return run


@pytest.mark.full
async def test_a_right_handler_comes_to_the_same_under_every_fault(prove: Prove) -> None:
    code, text, report = await prove("nothing")
    assert code == 0, text
    assert report["verdict"] == "proved"
    assert all(one["hit"] for one in report["faults"].values())
    assert report["dead"]
    assert report["applied"] == {"count: sold": 300 - report["dead"]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("random", "table sale, id=item-"),
        ("now", "table sale, id=item-"),
        ("counter", "table sale, id=item-"),
        ("unlocked", "table sale, id=item-"),
        ("task", "table mention, id=item-"),
        ("connection", "table mention, id=item-"),
    ],
)
async def test_a_wrong_handler_is_found(prove: Prove, wrong: str, found: str) -> None:
    code, text, report = await prove(wrong)
    assert code == 1, text
    assert report["verdict"] == "differs"
    assert found in text
    assert "--- one by one" in text
    assert "message: {" in text


def test_messages_are_sent_in_another_order_that_keeps_each_keys_and_some_of_them_twice() -> None:
    given = [record("sales", str(n), key=f"k{n % 5}", headers={}, partition=0) for n in range(100)]
    sent = interleaved(given, Random(1))
    first = list(dict.fromkeys(one.value for one in sent))
    assert first != [one.value for one in given]
    for key in {key_of(one) for one in given}:
        its = [one.value for one in given if key_of(one) == key]
        assert [value for value in first if value in its] == its
    assert Counter(Counter(one.value for one in sent).values()) == {1: 90, 2: 10}


def test_what_differs_is_a_diff_with_its_messages() -> None:
    given = {
        "records": [["sales", 0, 7, 1, None, b'{"item": "a"}'.hex(), "[]"]],
        "order": [["count", "sales", 0, 7]],
    }
    here = {"table stock": {"id=a": {"id": "a", "sold": 3}, "id=b": {"id": "b", "sold": 1}}}
    there = {"table stock": {"id=a": {"id": "a", "sold": 4}, "id=b": {"id": "b", "sold": 1}}}
    (one,) = differences(here, there, given)
    assert [*one.lines()] == [
        "table stock, id=a:",
        "--- one by one",
        "+++ under faults",
        "@@ -2,3 +2,3 @@",
        '  "id": "a",',
        '- "sold": 3',
        '+ "sold": 4',
        " }",
        '  message: {"item": "a"}',
    ]


def test_events_of_a_key_have_an_order_and_others_none() -> None:
    def event(id: str, key: str | None) -> dict[str, Any]:
        return {"topic": "t", "key": key, "source": "/s", "id": id}

    one, other = event("1", "a"), event("2", "a")
    assert as_evidence([one, other], []) != as_evidence([other, one], [])
    assert as_evidence([one, other], ["2"]) == as_evidence([other, one], ["2"])
    one, other = event("1", None), event("2", None)
    assert as_evidence([one, other], []) == as_evidence([other, one], [])


def test_there_is_no_verdict_unless_each_fault_was_one() -> None:
    result = Result()
    assert result.verdict == "proved"
    result.lacking = ["count: sold"]
    assert result.verdict == "no verdict"
    result.differences = [Difference("table stock", "id=a", None, {})]
    assert result.verdict == "differs"


def test_a_report_shows_no_markup_of_messages(tmp_path: Path) -> None:
    found = {"verdict": "differs", "wrong": ["<b>"], "faults": {}, "applied": {"<i>": 1}}
    write(tmp_path, found, ["<u>"])
    html = (tmp_path / "report.html").read_text()
    assert [one for one in ("<b>", "<i>", "<u>") if one in html] == []
    assert json.loads((tmp_path / "report.json").read_text()) == found


def test_a_file_without_a_proof_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CanNotProve, match=r"can't be read as Python"):
        load(tmp_path / "missing.py")
    (file := tmp_path / "empty_proof.py").write_text("")
    with pytest.raises(CanNotProve, match=r"declares no proof"):
        load(file)
