"""The words of a text of SQL are found as PostgreSQL finds them, and in time."""

import pytest

from onceward.observe.statements import code_of, first_word_of
from onceward.servers.guard import Guard

COMMENTS = [
    "-- " + 200 * "-" + "\n",
    200 * "/* one */ ",
    200 * "-- one\n",
    5_000 * " ",
    "/* COMMIT */",
    "/* a /* b */ COMMIT */",
    "/*/* a */ */ ; -- b\r",
    200 * "/*" + 200 * "*/",
]


@pytest.mark.parametrize("comment", COMMENTS)
def test_comments_are_skipped(comment: str) -> None:
    assert first_word_of(f"{comment}select 1") == "SELECT"
    fault = Guard(None).check(f"{comment}commit")
    assert str(fault).startswith("commit in a handler")


@pytest.mark.parametrize("comment", COMMENTS)
def test_a_comment_before_another_word_takes_no_time(comment: str) -> None:
    assert first_word_of(f"{comment}CALL settle()") == "OTHER"
    assert Guard(None).check(f"{comment}CALL settle()") is None


@pytest.mark.parametrize(
    "text", ["-- commit", "/* commit", "/* a */ -- COMMIT\n", "/* a /* b */ ; commit"]
)
def test_a_word_in_a_comment_is_none(text: str) -> None:
    assert first_word_of(text) == "OTHER"
    assert Guard(None).check(text) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a 'b' c", "a   c"),
        ("a 'it''s; b' c", "a    c"),
        ("a E'\\'; b' c", "a E  c"),
        ("a E'b' -- c\n '\\'; d' e", "a E  e"),
        ("a name'\\'; b", "a name ; b"),
        ('a "b""; c" d', "a    d"),
        ("a $$b; $c$ $$ d", "a   d"),
        ("a $b$ $$; $c$ ; $b$ d", "a   d"),
        ("a b$c$; d$c$", "a b$c$; d$c$"),
        ("a $1$; b $1$", "a $1$; b $1$"),
        ("a*/* b -- */; c", "a* ; c"),
        ("a /* 'b */; c'", "a  ; c "),
        ("a '-- b\n'; c", "a  ; c"),
        ("a 'b", "a  "),
        ("a $b$ c", "a  "),
        ("a E'b\\", "a E "),
    ],
)
def test_quoted_parts_and_comments_are_no_code(text: str, code: str) -> None:
    assert code_of(text) == code


@pytest.mark.parametrize("part", ["/*", "$a$ $b$ ", "E'\\'", "$$ ", "' ", '" ', "--", "*/", "a$"])
def test_a_long_text_takes_no_time(part: str) -> None:
    text = "".join(f"{part}{number}" for number in range(100_000))
    Guard(None).check(text)
    Guard(None).check(100_000 * part)
    first_word_of(100_000 * part)
