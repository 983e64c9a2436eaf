"""Removes secrets from every text that leaves the process, and what would control a terminal.

Secrets are recognised in three ways: those of the environment by their value; fields that an
event's model marks by their name, wherever a text quotes the payload; credentials in URLs by their
form.
"""

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any
from urllib.parse import quote, unquote

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

_INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
"""Categories of characters that control a terminal, or change how others are displayed."""
HIDDEN = "**********"
"""Replaces a secret; the same as pydantic's."""
_SHORTEST = 8
"""Fewest characters of a secret of the environment: a shorter one would match many words."""
_LONG = 16
"""Fewest characters for which a part of a secret is a secret itself, as a token in a path."""
_SECRET = re.compile(
    r"(?i)(?:PASSWORD|PASSWD|SECRET|TOKEN|HEADERS|(?:API|ACCESS|ACCOUNT|PRIVATE|SAS)_?KEY)"
    r"(?!.*_(?:FILE|PATH|DIR|URL|URI|ENDPOINT|NAME|PROVIDER|EXTENSIONS)$)"
)
"""Names of variables that hold a secret, also those that libraries read."""
_PASSWORD = re.compile(r"://[^\s:/@]*:(\S+)@")
"""In a URL, up to the last @, because special characters may lack their percent-encoding."""
_FORMS = (
    (re.compile(r"(?<=://)(?!user:password@)[^\s/:@]*:[^\s/@]+(?=@)"), HIDDEN),
    (re.compile(r"(?<=\bBearer )[\w.~+/=-]{8,}"), HIDDEN),
    (
        re.compile(
            r"(?i)([?&][\w.-]{0,40}(?:signature|\bsig\b|credential|token|secret|password|api_?key)"
            r"[\w.-]{0,40}=)[^&\s\"'<>\\]+"
        ),
        rf"\1{HIDDEN}",
    ),
)
"""Credentials in URLs and headers, and their replacements."""
_VALUES = (
    (re.compile(r"(?s)(?<=input_value=).{0,200}?(?=, input_type=)"), "…"),  # pydantic
    (re.compile(r"(?m)^DETAIL:.*\n?"), ""),  # PostgreSQL
)
"""Values of payloads and rows that errors quote, and their replacements."""
_TOKENS = re.compile(
    r"""[\w.]+\([^)]*\)?"""
    # A string may be escaped several times: a quote behind backslashes does not end it.
    r"""|b?\\{0,4}"(?:\\+.|[^"\\])*"?|b?\\{0,4}'(?:\\+.|[^'\\])*'?"""
    r"""|[\[\]{}]|[^\s\[\]{},"'\\]+""",
    re.DOTALL,
)
"""Tokens of JSON, of JSON in a string, and of Python literals."""
_DEPTHS = {"[": 1, "{": 1, "]": -1, "}": -1}


class Redactor:
    """Removes secrets from texts."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        self._secret: re.Pattern[str] | None = None
        self._models: list[type[BaseModel]] = []
        """Models whose secret fields are not known yet."""
        self._members: set[str] = set()
        self._member: re.Pattern[str] | None = None
        self._lock = Lock()  # spans are sent from a thread

    def learn(self, variables: Mapping[str, str], secret: Collection[str] = ()) -> None:
        """Add the secrets of an environment: variables with the name of one, or named in `secret`.

        Of a URL in any other variable the password is a secret.
        """
        found: list[str] = []
        for name, value in variables.items():
            found += _PASSWORD.findall(value)
            if name.upper() in secret or _SECRET.search(name):
                found += _parts(value)
        self.hide(found)

    def hide(self, secrets: Iterable[str]) -> None:
        """Add secrets, with every way to escape them."""
        for one in secrets:
            ways = {one, quote(one, safe=""), quote(one), unquote(one), repr(one)[1:-1]}
            ways |= {json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1]}
            self._secrets.update(way for way in ways if len(way) >= _SHORTEST)
        if self._secrets:
            self._secret = _any_of(self._secrets)

    def mark(self, model: type[BaseModel]) -> None:
        """Add the secret fields of a model: their values are removed where a text quotes payloads.

        They are those that are `writeOnly` in JSON Schema, as `SecretStr` is.
        """
        self._models.append(model)

    def redact(self, text: str) -> str:
        """Return the text without secrets."""
        return self._without_members(self.redact_known(text))

    def redact_known(self, text: str) -> str:
        """Return the text without secrets of the environment and credentials, with all fields."""
        if self._secret is not None:
            text = self._secret.sub(HIDDEN, text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        return text

    def redact_error(self, text: str) -> str:
        """Return the text of an error without secrets, and without values of payloads and rows."""
        for values, instead in _VALUES:
            text = values.sub(instead, text)
        return self.redact(text)

    def _without_members(self, text: str) -> str:
        with self._lock:
            while self._models:
                self._read_model(self._models.pop())
        if self._member is None:
            return text
        parts, at = [], 0
        for found in self._member.finditer(text):
            if found.start() >= at:
                parts += [text[at : found.end()], f'"{HIDDEN}"']
                at = _end_of_value(text, found.end())
        return "".join([*parts, text[at:]])

    def _read_model(self, model: type[BaseModel]) -> None:
        if fields := secret_fields(model):
            self._members |= fields
            names = _any_of(self._members).pattern
            self._member = re.compile(
                rf"""(?<!\w)(?:{names})(?:\\{{0,4}}["']\s*:\s*|=)(?!Secret\w+\()"""
            )


_of_the_process = Redactor()
learn, mark = _of_the_process.learn, _of_the_process.mark
redact, redact_error = _of_the_process.redact, _of_the_process.redact_error
redact_known = _of_the_process.redact_known


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _parts(secret: str) -> Iterator[str]:
    """Yield the secret, and its parts that are secrets by themselves."""
    scheme, is_url, rest = secret.partition("://")
    # The path and query of a webhook are a secret; a host or the name of a database is none.
    rest = "".join(re.split("[/?]", rest, maxsplit=1)[1:]) if scheme.startswith("http") else ""
    yield from (rest, *rest.split("?")) if len(rest) >= _SHORTEST else (secret,)
    if not is_url:
        rest = unquote(secret)
        for header in secret.split(","):
            yield header.strip()
            yield unquote(header.partition("=")[2]).strip()
    yield from (one for one in re.split(r"[\s,;=&/?#]+", rest) if len(one) >= _LONG)


def secret_fields(model: type[BaseModel]) -> set[str]:
    """Return the names of secret fields of a model, and of those in it, as JSON has them."""
    found: set[str] = set()
    for by_alias in (True, False):
        # The model may be incomplete, or a type in it has no JSON Schema.
        with suppress(Exception):
            schema = model.model_json_schema(by_alias, schema_generator=_Lenient)
            types = schema.get("$defs", {})
            secret = {f"#/$defs/{name}" for name, one in types.items() if _is_secret(one, ())}
            found.update(_secret_members(schema, secret))
    return found


class _Lenient(GenerateJsonSchema):
    """Generates a JSON Schema that accepts anything where a type has none."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> dict[str, Any]:
        """Return a schema that accepts anything."""
        return {}


def _secret_members(schema: Any, secret: Collection[str]) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(members := schema.get("properties"), dict):
            yield from (name for name, one in members.items() if _is_secret(one, secret))
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _secret_members(part, secret)


def _is_secret(schema: Any, secret: Collection[str]) -> bool:
    """Whether a value is a secret or holds one, but for members that have a name of their own."""
    if isinstance(schema, dict):
        if schema.get("writeOnly") is True or schema.get("$ref") in secret:
            return True
        schema = [part for name, part in schema.items() if name != "properties"]
    return isinstance(schema, list) and any(_is_secret(part, secret) for part in schema)


def _end_of_value(text: str, start: int) -> int:
    """Return where a value ends that begins at `start`; where it is cut off, the text's end."""
    depth = 0
    for token in _TOKENS.finditer(text, start):
        depth += _DEPTHS.get(token[0], 0)
        if depth <= 0:
            return token.end()
    return len(text)


def harmless(text: str) -> str:
    """Return a text, or JSON, with the characters escaped that are not visible."""
    if text.isprintable():
        return text
    return "".join(one if is_visible(one) else json.dumps(one)[1:-1] for one in text)


def is_visible(letter: str) -> bool:
    """Return whether a character is displayed, or is a tab or an end of line."""
    return letter in "\n\t" or unicodedata.category(letter) not in _INVISIBLE
