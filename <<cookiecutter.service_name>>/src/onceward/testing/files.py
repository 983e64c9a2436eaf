"""Files of records: dead letters as `service dead show ID --json` writes them, a line for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic_core import to_json

from onceward.handlers.registry import Handlers

from .errors import HarnessMisused
from .records import KafkaRecord, check_topic, record


def _bytes_of(content: Any) -> bytes | None:
    match [*content.items()] if isinstance(content, dict) else content:
        case None:
            return None
        case str(text) | [("text", str(text))]:
            return text.encode()
        case [("hex", str(digits))]:
            return bytes.fromhex(digits)
        case [("json", value)]:
            return to_json(value)
    raise ValueError('write a text, {"text": …}, {"hex": …}, {"json": …} or null')


_Content = Annotated[bytes | None, BeforeValidator(_bytes_of)]


class _Line(BaseModel):
    """Other fields of a dead letter are ignored."""

    topic: str
    value: _Content
    key: _Content = None
    headers: list[tuple[str, _Content]] = []
    partition: int = 0
    timestamp: int | None = None
    """In milliseconds. Without it, and unless times are kept: now."""


def records_of(path: Path, handlers: Handlers, *, keeps_times: bool) -> Iterator[KafkaRecord]:
    """Yield the record of each line. Raises `HarnessMisused` for one that has none."""
    for number, text in enumerate(path.read_text("utf-8").split("\n"), 1):
        if not text.strip():
            continue
        try:
            line = _Line.model_validate_json(text)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            where = ".".join(map(str, wrong["loc"])) or "it"
            raise HarnessMisused(
                f"{path}, line {number}: {where}: {wrong['msg']}. A line is a record in JSON with"
                " topic, value, key and headers, as `service dead show ID --json` writes it (`dead"
                " list` leaves out the value)"
            ) from None
        check_topic(handlers, line.topic)
        made = record(line.topic, line.value, key=line.key, headers={}, partition=line.partition)
        made.headers = tuple(line.headers)
        if keeps_times and line.timestamp is not None:
            made.timestamp = line.timestamp
        yield made
