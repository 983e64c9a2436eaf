"""The first word of a statement is found in time, whatever comments precede it."""

import pytest

from pipeline.observe.statements import _FIRST_WORD
from pipeline.servers.guard import _CONTROL

COMMENTS = [
    "-- " + 200 * "-" + "\n",
    200 * "/* one */ ",
    200 * "-- one\n",
    5_000 * " ",
    "/* COMMIT */",
]


@pytest.mark.parametrize("comment", COMMENTS)
def test_comments_are_skipped(comment: str) -> None:
    found = _FIRST_WORD.match(f"{comment}select 1")
    assert found
    assert found[1] == "select"
    control = _CONTROL.match(f"{comment}commit")
    assert control
    assert control[1] == "commit"


@pytest.mark.parametrize("comment", COMMENTS)
def test_a_comment_before_another_word_takes_no_time(comment: str) -> None:
    assert _FIRST_WORD.match(f"{comment}CALL settle()") is None
    assert _CONTROL.match(f"{comment}CALL settle()") is None


@pytest.mark.parametrize("text", ["-- commit", "/* commit", "/* a */ -- COMMIT\n"])
def test_a_word_in_a_comment_is_none(text: str) -> None:
    assert _FIRST_WORD.match(text) is None
    assert _CONTROL.match(text) is None
