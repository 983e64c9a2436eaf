"""Programs that a machine lacks: what becomes of a test, and how they are installed."""

import os
from pathlib import Path

import programs
import pytest
from programs import GoModule, Program

from tests.servers.programs import program

ABSENT = Program("no-such-program", "test", debian=("such-package",))


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PROGRAMS", (ABSENT,))
    monkeypatch.setattr(programs, "program", lambda name: ABSENT)
    for name in ("CI", "TEST_POOLER"):
        monkeypatch.delenv(name, raising=False)


def test_a_test_without_its_program_is_skipped_with_what_to_install() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"no-such-program .* such-package"):
        program("no-such-program")


@pytest.mark.parametrize("name", ["CI", "TEST_POOLER"])
def test_where_all_programs_have_to_be_there_the_test_fails(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        program("no-such-program")


def fake_apt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an `apt-get` on PATH that installs one program and knows no other package."""
    apt = folder / "apt-get"
    apt.write_text(
        "#!/bin/sh\n"
        'case "$*" in *unknown*) echo "E: no candidate" >&2; exit 100;; esac\n'
        f'case "$*" in *known*) printf "" > {folder}/known-program;'
        f" chmod +x {folder}/known-program;; esac\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_what_can_be_installed_is_although_another_package_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_apt(tmp_path, monkeypatch)
    known = Program("known-program", "test", debian=("known-package",))
    unknown = Program("other-program", "test", debian=("unknown-package",))

    programs.install([unknown, known])

    assert known.find() == tmp_path / "known-program"
    said = capsys.readouterr().err
    assert "no candidate" in said
    assert "other-program is not installed: install the package unknown-package" in said


def test_a_program_that_cannot_be_built_is_reported_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go = tmp_path / "go"
    go.write_text('#!/bin/sh\n[ "$1" = env ] && echo go9.99 && exit\necho no network >&2; exit 1\n')
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(programs, "CACHE", tmp_path / "cache")

    programs.install([Program("built", "test", go=GoModule("example.org/built", "v1.0.0"))])

    said = capsys.readouterr().err
    assert "no network" in said
    assert "built is not installed: build example.org/built@v1.0.0 with Go" in said


def test_an_old_go_is_passed_over(tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho go1.19.8\n")
    go.chmod(0o755)
    assert programs._version_of(str(go)) == (1, 19) < programs.OLDEST_GO
