"""Certificates that live as long as the tests: authorities, and what they vouch for."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.servers.programs import program

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, in PEM."""

    file: Path
    key: Path

    @property
    def together(self) -> Path:
        """The key and the certificate in one file, as Kafka takes them."""
        both = self.file.with_suffix(".both.pem")
        both.write_text(self.key.read_text() + self.file.read_text())
        return both


@dataclass(frozen=True)
class Authority:
    """Who vouches for others."""

    own: Certificate

    @property
    def file(self) -> Path:
        """What those have who trust it."""
        return self.own.file

    def vouch(self, name: str, *, host: str = "", password: str = "", days: int = 1) -> Certificate:
        """Make a certificate for a server at a host, or for a client of that name."""
        made, request = _files(self.file.parent, name), self.file.parent / f"{name}.csr"
        locked = ("-passout", f"pass:{password}") if password else ("-noenc",)
        _openssl(
            "req", "-new", *_NEW_KEY, *locked, "-subj", f"/CN={name}",
            "-addext", f"subjectAltName={host or f'DNS:{name}'}",
            "-keyout", str(made.key), "-out", str(request),
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.file), "-CAkey",
            str(self.own.key), "-copy_extensions", "copyall", "-days", str(days),
            "-out", str(made.file),
        )  # fmt: skip
        return made


def authority(folder: Path, name: str) -> Authority:
    """Make an authority that nobody else knows."""
    made = _files(folder, name)
    _openssl(
        "req", "-x509", "-new", *_NEW_KEY, "-noenc", "-subj", f"/CN={name}", "-days", "1",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", str(made.key), "-out", str(made.file),
    )  # fmt: skip
    return Authority(made)


def give_to_pooler(file: Path) -> Path:
    """Let PgBouncer read it, which does not run as root."""
    file.chmod(0o600)
    if os.geteuid() == 0:
        shutil.chown(file, "nobody")
    return file


def _files(folder: Path, name: str) -> Certificate:
    return Certificate(folder / f"{name}.pem", folder / f"{name}.key")


def _openssl(*arguments: str) -> None:
    openssl = program("openssl")
    done = subprocess.run([openssl, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
