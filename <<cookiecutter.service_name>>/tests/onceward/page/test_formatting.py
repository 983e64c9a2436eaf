"""How payloads and keys are shown: laid out, and nothing of them is another than what came."""

import pytest

from onceward.page.formatting import LONGEST, content, plain, ranges


def test_json_is_indented_and_each_token_is_unchanged() -> None:
    payload = (
        '{"price":1.10, "exact":0.1000000000000000055,"huge" :1e400,"count":1E5,'
        '"many":123456789012345678901234567890,"twice":1,"twice":2,"none":[ ],"flags":[true,null],'
        '"text":"a, \\"b\\": {c} \\u00e9 é","of":{"it":{}}}'
    )
    assert content({"text": payload}).splitlines() == [
        "{",
        '  "price": 1.10,',
        '  "exact": 0.1000000000000000055,',
        '  "huge": 1e400,',
        '  "count": 1E5,',
        '  "many": 123456789012345678901234567890,',
        '  "twice": 1,',
        '  "twice": 2,',
        '  "none": [],',
        '  "flags": [',
        "    true,",
        "    null",
        "  ],",
        '  "text": "a, \\"b\\": {c} \\u00e9 é",',
        '  "of": {',
        '    "it": {}',
        "  }",
        "}",
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("1E5", "12.50", "-0", "1e400", "9" * 5_000, '"ada"', "[]"),
        *("", "{", '{"a":1}}', '{"a":1} {"b":2}', "{'a':1}", "[1,]", "[01]"),
        "[" * 1_000 + "]" * 1_000,
        "[" * (LONGEST // 2) + "]" * (LONGEST // 2),
        "[" * LONGEST,
    ],
)
def test_json_scalars_invalid_json_and_deeply_nested_json_are_shown_unchanged(text: str) -> None:
    assert content({"text": text}) == text


def test_json_that_exceeds_the_limit_only_when_indented_is_shown_unchanged() -> None:
    text = f"[{','.join(['1'] * (LONGEST // 2 - 1))}]"
    assert content({"text": text}) == text


@pytest.mark.parametrize("key", ["1E5", "12.50", '{"id":1.10}', "[1,2]", "ada"])
def test_a_key_is_shown_as_one_has_to_search_for_it(key: str) -> None:
    assert plain({"text": key}, 60) == key


def test_bytes_that_are_no_text_are_shown_in_hexadecimal_digits() -> None:
    assert content({"hex": "ff00"}) == "2 bytes, not UTF-8:\nff00"
    assert content(None) == "(nothing)"


def test_numbers_that_follow_each_other_are_a_range() -> None:
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == ["0-3", "7", "9-10"]
    assert ranges([]) == []
