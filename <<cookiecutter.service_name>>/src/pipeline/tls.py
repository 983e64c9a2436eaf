"""TLS: authorities to trust, and the certificate of the client."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Unusable(ValueError):
    """A file can't be used; the text has its name and the reason."""


class Files(NamedTuple):
    """The files of one server, as its settings name them."""

    ca: Path | None
    certificate: Path | None
    key: Path | None
    password: str | None
    """That of the key."""


def mistakes(prefix: str, files: Files, unused: str | None) -> Iterator[str]:
    """Yield what is wrong with the settings of these files; `unused` is why they are not used."""
    names = [f"{prefix}_{name}" for name in ("CA_FILE", "CERTIFICATE_FILE", "KEY_FILE")]
    names.append(f"{prefix}_KEY_PASSWORD")
    if unused:
        for name in (name for name, value in zip(names, files, strict=True) if value):
            yield f"{name} is set, and would not be used: {unused}"
    if bool(files.certificate) != bool(files.key):
        missing, other = (names[2], names[1]) if files.certificate else (names[1], names[2])
        yield f"{missing} is not set, and {other} is"
    elif files.password and not files.key:
        yield f"{names[3]} is set, and {names[2]} is not"
    if not unused:
        try:
            context(files)
        except Unusable as error:
            yield f"{prefix}_…_FILE: {error}"


def context(files: Files) -> ssl.SSLContext:
    """Return the context of connections, which verify the server's certificate and name.

    Without `ca` the system's authorities are trusted. Raises `Unusable`.
    """
    ca, certificate, key, password = files
    for file in filter(None, (ca, certificate, key)):
        _read(file)
    try:
        found = ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        raise Unusable(f"{ca} holds no certificates in PEM") from None
    if certificate and key:
        try:
            # Without a callback OpenSSL prompts for the password on the terminal.
            found.load_cert_chain(certificate, key, password=lambda: password or "")
        except (ssl.SSLError, ValueError):
            raise Unusable(
                f"{certificate} and {key} are not a certificate and its key in PEM,"
                " or the key's password is another"
            ) from None
    return found


def _read(file: Path) -> None:
    try:
        file.read_bytes()
    except OSError as error:
        raise Unusable(f"{file} can't be read: {error.strerror}") from None
