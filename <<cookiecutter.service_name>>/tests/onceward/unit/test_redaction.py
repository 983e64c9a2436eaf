"""Secrets that are known are found in texts, whoever has put them there."""

import json
from contextlib import suppress
from decimal import Decimal
from typing import Annotated, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel, Field, PlainSerializer, RootModel, SecretStr, ValidationError

from onceward import Event
from onceward.events.event import Unpublishable
from onceward.handlers.staging import Outbox
from onceward.observe import exporters
from onceward.redaction import HIDDEN, Redactor, redact, secret_fields

SECRET = "k0rrekt-h0rse\"battery'staple é%"


@pytest.fixture
def redactor() -> Redactor:
    return Redactor()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("KAFKA_PASSWORD", "correct-horse", "correct-horse"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
        ("stripe_api_key", "sk_live_1234", "sk_live_1234"),
        ("PGURL", "postgresql://me:correct%20horse@db/x", "correct horse"),
        ("PGURL", "postgresql://me:correct%20horse@db/x", "correct%20horse"),
        ("PGURL", "postgresql://me:correct@horse/staple@db/x", "correct@horse/staple"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=1,authorization=Basic%20ZGVtbw", "Basic ZGVtbw"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=1,no-value ZGVtbw", "no-value ZGVtbw"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=Bearer%20ZGVtbzEyMzQ1Njc4", "ZGVtbzEyMzQ1Njc4"),
    ],
)
def test_a_secret_of_the_environment_is_known_by_its_variable(
    redactor: Redactor, name: str, value: str, shown: str
) -> None:
    redactor.learn({name: value})
    assert redactor.redact(f"it was {shown}!") == f"it was {HIDDEN}!"


@pytest.mark.parametrize(
    "shown",
    [
        "https://hooks.example.org/services/T02/B3?via=x1",
        "services/T02/B3?via=x1",
        "/services/T02/B3 and",
    ],
)
def test_a_secret_url_is_hidden_except_for_its_host(redactor: Redactor, shown: str) -> None:
    redactor.learn(
        {"DELAY_WEBHOOK": "https://hooks.example.org/services/T02/B3?via=x1"}, {"DELAY_WEBHOOK"}
    )
    assert "T02" not in redactor.redact(f"POST {shown}")
    whole = redactor.redact("https://hooks.example.org/services/T02/B3?via=x1")
    assert whole == f"https://hooks.example.org/{HIDDEN}"


def test_the_way_to_write_a_url_is_told_as_it_is(redactor: Redactor) -> None:
    way = "write it as postgresql+asyncpg://user:password@host:port/database"
    assert redactor.redact(way) == way


def test_what_a_database_url_names_is_no_secret(redactor: Redactor) -> None:
    redactor.learn(
        {
            "DATABASE": "postgresql+asyncpg://me:correct-horse@db.internal.example.org/parcel_tracker"
        },
        {"DATABASE"},
    )
    text = "PostgreSQL at db.internal.example.org, database parcel_tracker"
    assert redactor.redact(text) == text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKEN", "short"),
        ("PIPELINE_KAFKA_KEY_FILE", "/secrets/kafka.key"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token"),
        ("DATABASE_SECRET_NAME", "database"),
        ("PARTITION_KEY", "parcel_id"),
        ("HOME", "/home/somebody"),
        ("OTHER", "https://user@host.example.org/path"),
    ],
)
def test_other_variables_and_short_texts_are_no_secrets(
    redactor: Redactor, name: str, value: str
) -> None:
    redactor.learn({name: value})
    assert redactor.redact(value) == value


@pytest.mark.parametrize("written", [str, repr, json.dumps, lambda text: json.dumps([text])])
def test_a_secret_is_found_in_whatever_way_it_is_escaped(redactor: Redactor, written: Any) -> None:
    redactor.learn({"PASSWORD": SECRET})
    text = redactor.redact(written(SECRET))
    assert HIDDEN in text
    assert "battery" not in text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("at https://me:horse@db/x", f"at https://{HIDDEN}@db/x"),
        ("Authorization: Bearer abc.def-123", f"Authorization: Bearer {HIDDEN}"),
        (
            "GET https://b.s3.example/k?X-Amz-Signature=ab12&X-Amz-Date=1",
            f"GET https://b.s3.example/k?X-Amz-Signature={HIDDEN}&X-Amz-Date=1",
        ),
        ("https://a.example/k?sv=1&sig=a%2Fb", f"https://a.example/k?sv=1&sig={HIDDEN}"),
        ("https://a.example/k?access_token=abc", f"https://a.example/k?access_token={HIDDEN}"),
        ("https://a.example/k?signal=7&keys=4", "https://a.example/k?signal=7&keys=4"),
        ("http://host:80/path@2", "http://host:80/path@2"),
    ],
)
def test_credentials_in_urls_and_headers_are_known_by_their_form(
    redactor: Redactor, text: str, left: str
) -> None:
    assert redactor.redact(text) == left


class Pin(RootModel[SecretStr]):
    """Of a card."""


class Card(BaseModel):
    """A card, in a payment."""

    number: SecretStr
    pin: Pin | None = None
    holder: str


class Paid(BaseModel):
    """A payment."""

    order: str
    cards: list[Card]
    codes: list[SecretStr] = []
    by_name: dict[str, SecretStr] = {}
    iban: Annotated[str, Field(alias="Iban-No", json_schema_extra={"writeOnly": True})]
    amount: Decimal = Decimal(1)
    odd: Annotated[object, Field(default_factory=object)]


MARKED = {"number", "pin", "codes", "by_name", "iban", "Iban-No"}
PAID = {
    "order": "o-1",
    "cards": [{"number": "4111-hidden", "pin": "99-hidden", "holder": "Ada"}],
    "codes": ["a-hidden", "b]-hidden"],
    "by_name": {"one": "c-hidden"},
    "Iban-No": 'DE"}-hidden',
    "amount": 12,
}


def test_secret_fields_are_named_as_payloads_name_them() -> None:
    assert secret_fields(Paid) == MARKED


@pytest.mark.parametrize(
    "written",
    [json.dumps, repr, lambda one: repr(json.dumps(one).encode()), lambda one: json.dumps(str(one))]
    + [lambda one, end=end: json.dumps(one)[:end] for end in (60, 90, 140, 170, 200)],
)
def test_values_of_secret_fields_are_left_out_wherever_a_payload_is_quoted(
    redactor: Redactor, written: Any
) -> None:
    redactor.mark(Paid)
    text = redactor.redact(f"can't pay {written(PAID)}")
    assert "hidden" not in text
    assert "o-1" in text


def test_where_fields_are_shown_known_secrets_are_not(redactor: Redactor) -> None:
    redactor.mark(Card)
    redactor.learn({"A_TOKEN": "correct-horse"})
    text = '{"pin": "1234", "text": "correct-horse"}'
    assert redactor.redact_known(text) == text.replace("correct-horse", HIDDEN)
    assert "1234" not in redactor.redact(text)


def test_secrets_are_hidden_even_if_one_ends_with_a_backslash(
    redactor: Redactor,
) -> None:
    redactor.mark(Paid)
    text = redactor.redact(r'{"number":"hidden\\","pin":"hidden","order":"o-1"}')
    assert "hidden" not in text


def test_json_stays_json_without_its_secrets(redactor: Redactor) -> None:
    redactor.mark(Paid)
    found = json.loads(redactor.redact(json.dumps(PAID)))
    assert found["cards"] == [{"number": HIDDEN, "pin": HIDDEN, "holder": "Ada"}]
    assert (found["codes"], found["amount"]) == (HIDDEN, 12)


def test_a_model_that_is_printed_shows_no_field_that_is_marked(redactor: Redactor) -> None:
    redactor.mark(Paid)
    paid = Paid.model_validate({**PAID, "odd": None})
    text = redactor.redact(f"{paid!r} and {paid}")
    assert "hidden" not in text
    assert "number=SecretStr('**********')" in text


def test_the_fields_of_every_event_are_known_without_a_word() -> None:
    class Opened(Event, type="opened"):
        combination_of_the_safe: SecretStr

    text = redact('{"combination_of_the_safe": "17-4-32"}')
    assert text == f'{{"combination_of_the_safe": "{HIDDEN}"}}'


def test_long_texts_that_are_made_to_be_slow_are_not(redactor: Redactor) -> None:
    redactor.mark(Paid)
    for piece in ("&token", "input_value=", "\\", '"number":[', "'", "://a:", "iban=", "a."):
        redactor.redact_error(piece * 100_000)


def test_values_that_errors_quote_are_left_out_of_texts_made_of_them(redactor: Redactor) -> None:
    with pytest.raises(ValidationError) as error:
        Card.model_validate_json('{"number": "4111", "holder": {"name": "hidden"}}')
    assert "hidden" in str(error.value)
    text = redactor.redact_error(f"no card: {error.value}\nDETAIL:  Failing row (hidden).\nmore")
    assert "hidden" not in text
    assert "Input should be a valid string [type=string_type, input_value=…, input_type=" in text
    assert text.endswith("more")


def test_an_event_that_would_publish_asterisks_for_a_secret_is_refused() -> None:
    class Sealed(Event, type="sealed", topic="seals"):
        seal: SecretStr

    class Opened(Event, type="unsealed", topic="seals"):
        seal: Annotated[SecretStr, PlainSerializer(SecretStr.get_secret_value)]

    outbox = Outbox("/tests", 1_000)
    with pytest.raises(Unpublishable, match=r"Sealed\.seal is another value"):
        outbox.stage(Sealed(seal=SecretStr("wax")), id="1", key=None, sequence=None)
    outbox.stage(Opened(seal=SecretStr("wax")), id="1", key=None, sequence=None)


def test_exported_spans_contain_no_secret_and_are_otherwise_unchanged() -> None:
    received = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporters.Redacting(received)))
    bearer, link = "Bearer 0123456789abcdef", trace.Link(trace.SpanContext(1, 2, is_remote=True))
    attributes: dict[str, Any] = {"header": bearer, "headers": [bearer], "count": 3}
    with (
        suppress(ValueError),
        provider.get_tracer("test").start_as_current_span(
            f"GET {bearer}", kind=trace.SpanKind.CLIENT, attributes=attributes, links=[link]
        ) as span,
    ):
        span.add_event(bearer, {"header": bearer})
        raise ValueError(bearer)
    (sent,) = received.get_finished_spans()
    assert "0123456789abcdef" not in sent.to_json()
    hidden = f"Bearer {HIDDEN}"
    assert (sent.name, sent.status.description) == (f"GET {hidden}", f"ValueError: {hidden}")
    assert sent.attributes == {"header": hidden, "headers": [hidden], "count": 3}
    same = ("kind", "links", "parent", "resource", "start_time", "end_time")
    assert isinstance(span, ReadableSpan)
    assert all(getattr(sent, name) == getattr(span, name) for name in same)
    assert sent.get_span_context() == span.get_span_context()
    assert sent.instrumentation_scope == span.instrumentation_scope
