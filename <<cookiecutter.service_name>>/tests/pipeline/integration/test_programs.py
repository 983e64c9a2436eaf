"""What becomes of a test whose program is missing."""

import pytest

from tests.servers.programs import program


def test_a_person_is_told_what_is_missing_and_the_test_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CI", "TEST_POOLER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no-such-program .*apt-get install such"):
        program("no-such-program", "such")


@pytest.mark.parametrize("name", ["CI", "TEST_POOLER"])
def test_where_all_programs_have_to_be_there_the_test_fails(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        program("no-such-program", "such")
