"""The parameters of requests and forms, validated: they may have any content."""

import json
from collections.abc import Mapping
from datetime import datetime
from urllib.parse import parse_qs, urlencode

from starlette.requests import ClientDisconnect, Request

from operate.dead import STATES, Selection, State
from operate.errors import Refused
from operate.output import Content
from pipeline.redaction import HIDDEN

SEARCHED = ("reason", "consumer", "event", "type", "topic", "key")
_LARGEST_FORM = 200_000
_LONGEST_KEY = 1_000


async def form(request: Request) -> Mapping[str, str] | None:
    """Return a form's fields; None if it is too large, cut off, or not of the page."""
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != "application/x-www-form-urlencoded":
        return None
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST_FORM:
                return None
        fields = parse_qs(body.decode("ascii"), max_num_fields=20, errors="strict")
    except (ClientDisconnect, ValueError):
        return None
    found = {name: values[0] for name, values in fields.items()}
    return None if any("\0" in value for value in found.values()) else found


def why(given: Mapping[str, str]) -> str:
    """Return the operator's reason for a change. Raises `Refused` if it is missing."""
    text = given.get("why", "").strip()
    if not text:
        raise Refused("enter a reason: it is stored with the change")
    return text[:1_000]


def payload(given: Mapping[str, str]) -> bytes:
    """Return the payload of a form. Raises `Refused` if it is not JSON or has hidden secrets."""
    text = given.get("payload", "")
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the payload is not JSON: {error}") from error
    if HIDDEN in text:
        raise Refused("the page hides secrets of the payload: have the event sent again instead")
    return text.encode()


def state(request: Request) -> State:
    """Return the state to list: `dead` if the parameter is missing or unknown."""
    given = request.query_params.get("state")
    return next((one for one in STATES if one == given), "dead")


def search(given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the fields of a search; an empty one matches all. Raises `Refused` for NUL."""
    found = {name: given.get(name, "").strip() for name in SEARCHED}
    if any("\0" in text for text in found.values()):
        raise Refused("a search can't contain a NUL character: stored texts have none")
    return found


def selection(wanted: Mapping[str, str], until: datetime | None = None) -> Selection:
    """Return the selection for a search; with `until`, without entries that are newer."""
    key = wanted["key"]
    return Selection(
        reasons=[wanted["reason"]] if wanted["reason"] else None,
        consumers=[wanted["consumer"]] if wanted["consumer"] else None,
        event_id=wanted["event"] or None,
        type=wanted["type"] or None,
        topic=wanted["topic"] or None,
        record_key=key.encode() if key else None,
        until=until,
    )


def previewed(form: Mapping[str, str]) -> tuple[Selection, str]:
    """Return the entries that a preview has counted, and the search as text.

    The preview's time is a field of its form: entries that have died since are left out. Raises
    `Refused` if it is missing.
    """
    wanted = search(form)
    try:
        until = datetime.fromisoformat(form.get("until", ""))
    except ValueError:
        until = None
    if until is None or until.tzinfo is None:
        raise Refused("the form has no preview time: search again, and use the new preview")
    text = ", ".join(f"{name} {value!r}" for name, value in wanted.items() if value)
    return selection(wanted, until), text or "everything"


def link(state: State, key: Content, **more: str) -> str | None:
    """Return the path of a search for a key; None if a search can't express the key."""
    text = (key or {}).get("text", "")
    if not text or text != text.strip() or "\0" in text or len(text) > _LONGEST_KEY:
        return None
    return f"/dead?{urlencode({'state': state, 'key': text, **more})}"
