"""The parameters of requests and forms, validated: they may have any content."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from urllib.parse import parse_qs, urlencode

import typer
from starlette.requests import ClientDisconnect, Request

from onceward.cli import dead_commands
from onceward.cli.dead import STATES, Selection, State, Store
from onceward.cli.dead_events import DeadEvents
from onceward.cli.errors import Refused
from onceward.cli.output import Content
from onceward.operators.stopping import Subject

SEARCHED = ("reason", "consumer", "event", "type", "topic", "key", "release", "older", "newer")
NO_CONSUMER = "(none)"
"""Searches for messages that belong to no consumer."""
_LARGEST_FORM = 200_000
_MOST_FIELDS = 200
_LONGEST_KEY = 1_000
_KEY = re.compile("(?:[0-9a-f]{2}){1,32}")
_NUMBER = re.compile("[0-9]{1,18}")


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
        fields = parse_qs(body.decode("ascii"), max_num_fields=_MOST_FIELDS, errors="strict")
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


def because(given: Mapping[str, str]) -> str | None:
    """Return the operator's reason for a change that needs none; None if it is empty."""
    return given.get("why", "").strip()[:1_000] or None


def lasts(given: Mapping[str, str]) -> timedelta | None:
    """Return the time of a form, in minutes; None if it is empty. Raises `Refused`."""
    text = given.get("minutes", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text)):
        raise Refused("the time is a number of minutes, or empty: until it is resumed")
    return timedelta(minutes=int(text))


def rate(given: Mapping[str, str]) -> float:
    """Return how much a form allows in a second; 0 if it is empty. Raises `Refused`."""
    text = given.get("rate", "").strip()
    try:
        found = float(text or "0")
    except ValueError:
        found = 0.0
    if text and not found:
        raise Refused("the rate is a number of messages in a second, or empty: nothing is taken")
    return found


def partition(given: Mapping[str, str]) -> int | None:
    """Return the number of a partition; None if it is empty. Raises `Refused`."""
    text = given.get("partition", "").strip()
    if text and not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise Refused("the partition is a number, or empty: all")
    return int(text) if text else None


def day(given: Mapping[str, str]) -> date:
    """Return the day of a form. Raises `Refused`."""
    try:
        return date.fromisoformat(given.get("day", ""))
    except ValueError:
        raise Refused("the day is as in 2026-11-20") from None


def span(text: str) -> timedelta:
    """Return a time such as 90s, 15m, 2h or 7d. Raises `Refused`."""
    try:
        return dead_commands.span(text)
    except typer.BadParameter as error:
        raise Refused(error.message) from None


def seconds(text: str, most: float) -> float:
    """Return seconds, at most so many. Raises `Refused`."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= most:
        raise Refused(f"{text!r} is not a number of seconds, at most {most:g}")
    return found


def subject(given: Mapping[str, str]) -> Subject:
    """Return what a form names. Raises `Refused` for a key that is not in hex."""
    try:
        key = bytes.fromhex(given.get("key", ""))
    except ValueError:
        raise Refused("the key is in hex") from None
    return Subject(given.get("kind", ""), given.get("name", ""), given.get("topic", ""), key)


def payload(given: Mapping[str, str]) -> bytes:
    """Return the payload of a form. Raises `Refused` if it is not JSON."""
    text = given.get("payload", "")
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the payload is not JSON: {error}") from error
    return text.encode()


def state(request: Request) -> State:
    """Return the state to list: `dead` if the parameter is missing or unknown."""
    given = request.query_params.get("state")
    return next((one for one in STATES if one == given), "dead")


def search(given: Mapping[str, str]) -> Mapping[str, str]:
    """Return the fields of a search; an empty one matches all. Raises `Refused` for NUL."""
    return {name: searched(given, name) for name in SEARCHED}


def searched(given: Mapping[str, str], name: str) -> str:
    """Return a field of a search; empty if it is missing. Raises `Refused` for NUL."""
    text = given.get(name, "").strip()
    if "\0" in text:
        raise Refused("a search can't contain a NUL character: stored texts have none")
    return text


def age(given: Mapping[str, str], name: str) -> timedelta | None:
    """Return the time of a field such as 90s, 15m, 2h or 7d; None if it is empty.

    Raises `Refused`.
    """
    text = given.get(name, "").strip()
    return span(text) if text else None


def selection(wanted: Mapping[str, str], at: datetime | None = None) -> Selection:
    """Return the selection for a search as of a time, without entries that are newer.

    None: as of now, also with those that get into their state from now on. Raises `Refused`.
    """
    key, consumer = wanted["key"], wanted["consumer"]
    older, newer, now = age(wanted, "older"), age(wanted, "newer"), at or datetime.now(UTC)
    until = at if older is None else now - older
    return Selection(
        reasons=[wanted["reason"]] if wanted["reason"] else None,
        consumers=["" if consumer == NO_CONSUMER else consumer] if consumer else None,
        event_id=wanted["event"] or None,
        type=wanted["type"] or None,
        topic=wanted["topic"] or None,
        record_key=key.encode() if key else None,
        release=wanted["release"] or None,
        since=None if newer is None else now - newer,
        until=until,
    )


def discarded_from(kind: type[Store], given: Mapping[str, str]) -> State:
    """Return the state whose entries are meant: events can also be discarded while they wait."""
    return "waiting" if kind is DeadEvents and given.get("state") == "waiting" else "dead"


def until(given: Mapping[str, str]) -> datetime | None:
    """Return the time until which entries are meant; None if there is none with a time zone."""
    try:
        time = datetime.fromisoformat(given.get("until", ""))
        return time.astimezone(UTC) if time.tzinfo else None
    except (ValueError, OverflowError):  # the first and last hours of the calendar have none
        return None


def after(given: Mapping[str, str], kind: type[Store]) -> bytes | int | None:
    """Return the key of the last entry that was listed; None if there is none that can be one."""
    text = given.get("after", "")
    if kind.key_type == "bytea":
        return bytes.fromhex(text) if _KEY.fullmatch(text) else None
    return int(text) if _NUMBER.fullmatch(text) else None


def previewed(form: Mapping[str, str]) -> tuple[Selection, str]:
    """Return the entries that a preview has counted, and the search as text.

    The preview's time is a field of its form: entries that have died since are left out. Raises
    `Refused` if it is missing.
    """
    wanted = search(form)
    time = until(form)
    if time is None:
        raise Refused("the form has no preview time: search again, and use the new preview")
    text = ", ".join(f"{name} {value!r}" for name, value in wanted.items() if value)
    return selection(wanted, time), text or "everything"


def link(state: State, key: Content, **more: str) -> str | None:
    """Return the path of a search for a key; None if a search can't express the key."""
    text = (key or {}).get("text", "")
    if not text or text != text.strip() or "\0" in text or len(text) > _LONGEST_KEY:
        return None
    return f"/dead?{urlencode({'state': state, 'key': text, **more})}"
