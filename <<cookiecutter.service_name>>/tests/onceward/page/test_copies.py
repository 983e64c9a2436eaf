"""A dead letter that is edited: a copy with an id of its own is redriven in its stead."""

import html
import json
import re

import asyncpg
import httpx2
import pytest

from onceward.page.formatting import LONGEST, editable

from .conftest import buried, csrf
from .test_page import HOSTILE, assert_harmless
from tests.contract.bank import Deposit
from tests.onceward.integration.applier import Applier
from tests.onceward.integration.bank import Bank


async def edit(
    client: httpx2.AsyncClient, id: str, payload: object, why: str = "wrong amount"
) -> httpx2.Response:
    """Send the form of the page, with a payload in JSON."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    form = {"csrf": await csrf(client), "payload": text, "why": why}
    return await client.post(f"/dead/{id}/copy", data=form)


def offered(text: str) -> str | None:
    """Return what a page offers to edit."""
    found = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", text, re.DOTALL)
    return html.unescape(found[1]) if found else None


async def test_an_edited_copy_is_handled_in_the_place_of_its_letter(
    ann: httpx2.AsyncClient, bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1, "ada"), Deposit(2, "ada"))
    payload = json.loads(offered((await ann.get(f"/dead/{id}")).text) or "")
    assert payload["amount"] == 1
    answer = await edit(ann, id, payload | {"amount": 7})
    assert answer.status_code == 200, answer.text
    other = await db.fetchval(
        "SELECT left(encode(key, 'hex'), 16) FROM pipeline.backlog WHERE \"offset\" = 1"
    )
    await ann.post(f"/dead/{other}/redrive", data={"csrf": await csrf(ann)})
    await applier.work_off()
    assert bank.calls == [7, 2], "in the order of the key"
    (letter,) = await applier.backlog()
    new_id = await db.fetchval("SELECT id FROM pipeline.inbox WHERE id LIKE '1~%'")
    assert re.fullmatch("1~[0-9a-f]{12}", new_id)
    assert letter["discarded_by"] == "ann"
    assert letter["discarded_why"] == f"replaced by {new_id}: wrong amount"
    assert (await edit(ann, id, payload)).status_code == 409, "it was discarded"
    # The letter itself is known if it comes again, and so it is not applied.
    await applier.apply(Deposit(1, "ada"))
    assert bank.calls == [7, 2]


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 5_000, "is not JSON"),
        ({"account": "ada"}, "the payload is invalid"),
        ({"account": "ada", "amount": "many"}, "the payload is invalid"),
        ({"account": "**********", "amount": 1}, "secrets of the payload are hidden"),
    ],
)
async def test_an_edit_with_an_invalid_payload_is_refused_and_changes_nothing(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection, payload: object, said: str
) -> None:
    id = await buried(applier, db, Deposit(1))
    answer = await edit(ann, id, payload)
    assert answer.status_code == 409
    assert said in answer.text
    (row,) = await applier.backlog()
    assert row["died_at"]
    assert not row["discarded_at"]


async def test_an_edit_needs_a_reason(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1))
    assert (await edit(ann, id, {"account": "ada", "amount": 2}, why=" ")).status_code == 409
    assert len(await applier.backlog()) == 1


async def test_a_copy_whose_id_would_be_that_of_the_letter_is_refused(
    ann: httpx2.AsyncClient, bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    """As in structured mode, where the id is in the payload."""
    id = await buried(applier, db, Deposit(1))
    event = {
        "specversion": "1.0",
        "id": "1",
        "source": "/tests",
        "type": "deposited",
        "data": {"account": "ada", "amount": 1},
    }
    content_type = [["content-type", "application/cloudevents+json"]]
    await db.execute(
        "UPDATE pipeline.backlog SET headers = $1, value = $2",
        json.dumps(content_type),
        json.dumps(event).encode(),
    )
    answer = await edit(ann, id, event | {"data": {"account": "ada", "amount": 7}})
    assert answer.status_code == 409
    assert "change the id in the payload" in answer.text
    changed = event | {"id": "1, corrected", "data": {"account": "ada", "amount": 7}}
    assert (await edit(ann, id, changed)).status_code == 200
    await applier.work_off()
    assert bank.calls == [7]


async def test_editing_a_record_without_a_consumer_redrives_it_for_all_consumers(
    ann: httpx2.AsyncClient, bank: Bank, applier: Applier, db: asyncpg.Connection
) -> None:
    await applier.apply(Deposit(1, type=""))
    (row,) = await applier.backlog()
    assert (row["reason"], row["consumer"]) == ("missing attribute", "")
    names = {"ce_specversion": "1.0", "ce_source": "/tests", "ce_type": "deposited"}
    await db.execute("UPDATE pipeline.backlog SET headers = $1", json.dumps([*names.items()]))
    id = row["key"].hex()[:16]
    assert "All consumers of the topic" in (await ann.get(f"/dead/{id}")).text
    answer = await edit(ann, id, {"account": "ada", "amount": 1})
    assert answer.status_code == 200, answer.text
    await applier.work_off()
    assert bank.calls == [1]


async def test_a_hostile_payload_is_offered_as_text_with_the_same_meaning(
    ann: httpx2.AsyncClient, applier: Applier, db: asyncpg.Connection
) -> None:
    id = await buried(applier, db, Deposit(1, account=HOSTILE))
    text = (await ann.get(f"/dead/{id}")).text
    assert_harmless(text)
    assert json.loads(offered(text) or "")["account"] == HOSTILE


def test_only_json_that_is_shown_whole_is_edited() -> None:
    assert editable({"text": '{"a": 1.50, "b": "\u202e"}'}) == (
        '{\n  "a": 1.50,\n  "b": "\\u202e"\n}'
    )
    assert editable(None) is None
    assert editable({"hex": "ff"}) is None
    assert editable({"text": "no JSON"}) is None
    assert editable({"text": f'"{"x" * LONGEST}"'}) is None
    assert editable({"text": '{"token": "**********"}'}) is None
