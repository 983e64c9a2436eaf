"""The header Idempotency-Key: a string in quotes, or the same without them."""

import pytest

from onceward.http import InvalidKey
from onceward.http.app import _key_of


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ('"8e03978e-40d5-43dd-bc93-6894a57f9324"', "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        ("8e03978e-40d5-43dd-bc93-6894a57f9324", "8e03978e-40d5-43dd-bc93-6894a57f9324"),
        ('"two words"', "two words"),
        (r'"a \"quote\" and a \\"', r'a "quote" and a ' + "\\"),
        ("x" * 255, "x" * 255),
    ],
)
def test_a_key_is_the_same_with_quotes_and_without(header: str, key: str) -> None:
    assert _key_of(header) == key


@pytest.mark.parametrize(
    "header", ["", '""', '"a', 'a"b', "two words", "x" * 256, f'"{"x" * 256}"', r'"\a"', "ü"]
)
def test_what_is_no_key_is_refused(header: str) -> None:
    with pytest.raises(InvalidKey, match="1 to 255 visible ASCII characters"):
        _key_of(header)


def test_a_key_is_needed() -> None:
    with pytest.raises(InvalidKey, match="needs the header Idempotency-Key"):
        _key_of(None)
