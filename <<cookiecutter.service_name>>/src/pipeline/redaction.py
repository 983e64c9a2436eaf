"""Secrets, and how they are kept out of every text that leaves the process.

Three kinds are known: by its value what the environment holds; by its name what an event's model
marks, wherever a text quotes the payload; by its form what is a credential in anybody's URL.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any
from urllib.parse import quote, unquote
from weakref import WeakSet

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

HIDDEN = "**********"
"""What is written in place of a secret, by pydantic too."""
_SHORTEST = 8
"""Characters of a secret of the environment: a shorter one would be found in many words."""
_LONG = 16
"""Characters from which a part of a secret is one by itself: a token in a path, and no word."""
_SECRET = re.compile(
    r"(?i)(?:PASSWORD|PASSWD|SECRET|TOKEN|HEADERS|(?:API|ACCESS|ACCOUNT|PRIVATE|SAS)_?KEY)"
    r"(?!.*_(?:FILE|PATH|DIR|URL|URI|ENDPOINT|NAME)$)"
)
"""Names of variables that hold a secret, those of libraries too."""
_PASSWORD = re.compile(r"://[^\s:/@]*:(\S+)@")
"""In a URL; to the last @, because special characters may not be percent-encoded as they should."""
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
"""Credentials of URLs and headers, whoever they are of."""
_VALUES = (
    (re.compile(r"(?s)(?<=input_value=).{0,200}?(?=, input_type=)"), "…"),  # pydantic
    (re.compile(r"(?m)^DETAIL:.*\n?"), ""),  # PostgreSQL
)
"""How errors quote values of payloads and rows."""
_TOKENS = re.compile(
    r"""[\w.]+\([^)]*\)?"""
    # However often it was escaped: a quote behind backslashes may end nothing.
    r"""|b?\\{0,4}"(?:\\+.|[^"\\])*"?|b?\\{0,4}'(?:\\+.|[^'\\])*'?"""
    r"""|[\[\]{}]|[^\s\[\]{},"'\\]+""",
    re.DOTALL,
)
"""Of JSON, of JSON in a string, and of Python's way to write values."""
_DEPTHS = {"[": 1, "{": 1, "]": -1, "}": -1}


class Redactor:
    """Knows secrets, and takes them out of texts."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        self._secret: re.Pattern[str] | None = None
        self._models: WeakSet[type[BaseModel]] = WeakSet()
        """Those whose fields have not been looked at."""
        self._members: set[str] = set()
        self._member: re.Pattern[str] | None = None
        self._lock = Lock()  # spans are sent from a thread

    def learn(self, variables: Mapping[str, str], secret: Collection[str] = ()) -> None:
        """Find the secrets of an environment: what its variables' names say, or those in `secret`.

        Of any other URL the password is one.
        """
        found: list[str] = []
        for name, value in variables.items():
            found += _PASSWORD.findall(value)
            if name.upper() in secret or _SECRET.search(name):
                found += _parts(value)
        self.hide(found)

    def hide(self, secrets: Iterable[str]) -> None:
        """Take these out of texts, in whatever way one may escape them."""
        for one in secrets:
            ways = {one, quote(one, safe=""), quote(one), unquote(one), repr(one)[1:-1]}
            ways |= {json.dumps(one)[1:-1], json.dumps(one, ensure_ascii=False)[1:-1]}
            self._secrets.update(way for way in ways if len(way) >= _SHORTEST)
        if self._secrets:
            self._secret = _any_of(self._secrets)

    def mark(self, model: type[BaseModel]) -> None:
        """Take the values of the model's secret fields out, wherever a text quotes payloads.

        They are those that JSON Schema has as `writeOnly`, as `SecretStr` is.
        """
        self._models.add(model)

    def redact(self, text: str) -> str:
        """Return the text without secrets."""
        if self._secret is not None:
            text = self._secret.sub(HIDDEN, text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        return self._without_members(text)

    def redact_error(self, text: str) -> str:
        """Return what is said of an error without secrets, or values of payloads and rows."""
        for values, instead in _VALUES:
            text = values.sub(instead, text)
        return self.redact(text)

    def _without_members(self, text: str) -> str:
        if self._models:
            with self._lock:
                self._look_at_models()
        if self._member is None:
            return text
        parts, at = [], 0
        for found in self._member.finditer(text):
            if found.start() >= at:
                parts += [text[at : found.end()], f'"{HIDDEN}"']
                at = _end_of_value(text, found.end())
        return "".join([*parts, text[at:]])

    def _look_at_models(self) -> None:
        models = list(self._models)
        self._members.update(*map(secret_fields, models))
        if self._members:
            names = _any_of(self._members).pattern
            self._member = re.compile(
                rf"""(?<!\w)(?:{names})(?:\\{{0,4}}["']\s*:\s*|=)(?!Secret\w+\()"""
            )
        # Last: who finds none that was not looked at goes by the names.
        self._models.difference_update(models)


_of_the_process = Redactor()
learn, mark = _of_the_process.learn, _of_the_process.mark
redact, redact_error = _of_the_process.redact, _of_the_process.redact_error


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _parts(secret: str) -> Iterator[str]:
    """Yield the secret, and what may be shown of it by itself."""
    scheme, is_url, rest = secret.partition("://")
    # A webhook has its secret there. What else a URL names, as a host or a database, is none.
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
        # It may not be complete, and then no payload is of it; or a type of its author's fails.
        with suppress(Exception):
            schema = model.model_json_schema(by_alias, schema_generator=_Lenient)
            types = schema.get("$defs", {})
            secret = {f"#/$defs/{name}" for name, one in types.items() if _is_secret(one, ())}
            found.update(_secret_members(schema, secret))
    return found


class _Lenient(GenerateJsonSchema):
    """Describes a model as far as JSON Schema can."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def handle_invalid_for_json_schema(self, schema: object, error_info: str) -> dict[str, Any]:
        """Describe it as anything."""
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
