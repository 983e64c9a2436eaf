"""TLS contexts: trusted authorities, and the client's certificate."""

import ssl
from pathlib import Path


class Unusable(ValueError):
    """A file can't be used; the text has its name and the reason."""


def context(
    ca: Path | None, certificate: Path | None, key: Path | None, password: str | None
) -> ssl.SSLContext:
    """Return a context that verifies the server's certificate and name.

    Without `ca` the system's authorities are trusted. Raises `Unusable`.
    """
    for file in filter(None, (ca, certificate, key)):
        _read(file)
    try:
        found = ssl.create_default_context(cafile=ca)
    except ssl.SSLError:
        raise Unusable(f"{ca} holds no certificates in PEM") from None
    if certificate and key:
        try:
            # Without a password OpenSSL would prompt for one on the terminal.
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
