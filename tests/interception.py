"""A proxy that intercepts TLS, as companies have it, with certificates of its own authority."""

import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.programs import require

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


class Interceptor(ThreadingHTTPServer):
    """Answers for each host with the files of its folder. It listens on the loopback interface."""

    daemon_threads = True

    def __init__(self, folder: Path, certificate: Path) -> None:
        """`folder` has a folder for each host, `certificate` the hosts' key and certificate."""
        super().__init__(("127.0.0.1", 0), _Intercepted)
        self.folder = folder
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate)
        self.connected: set[str] = set()
        """Hosts to which clients have wanted a connection."""
        self.served: set[str] = set()
        """Hosts whose certificate they have accepted."""


class _Intercepted(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Interceptor
    host = ""

    def do_CONNECT(self) -> None:
        self.host = self.path.rpartition(":")[0]
        self.directory = str(self.server.folder / self.host)
        self.server.connected.add(self.host)
        self.send_response(200)
        self.end_headers()
        try:
            self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        except OSError:  # the client has refused the certificate
            self.close_connection = True
            return
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")

    def do_GET(self) -> None:
        self.server.served.add(self.host)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def intercepting(folder: Path, certificate: Path) -> Iterator[Interceptor]:
    """Run a proxy for the time of a block."""
    with Interceptor(folder, certificate) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=[0.02])
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def authority(folder: Path, hosts: Sequence[str]) -> tuple[Path, Path]:
    """Make an authority; returns its certificate, and the hosts' key and certificate in a file."""
    own, key = folder / "authority.pem", folder / "authority.key"
    request, certificate = folder / "hosts.csr", folder / "hosts.pem"
    _openssl(
        *("req", "-x509", "-new", *_NEW_KEY, "-subj", "/CN=Interceptor", "-days", "1"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        *("-keyout", str(key), "-out", str(own)),
    )
    names = ",".join(f"DNS:{host}" for host in hosts)
    _openssl(
        *("req", "-new", *_NEW_KEY, "-subj", f"/CN={hosts[0]}"),
        *("-addext", f"subjectAltName={names}"),
        *("-keyout", str(certificate), "-out", str(request)),
    )
    signed = _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(own), "-CAkey", str(key)),
        *("-copy_extensions", "copyall", "-days", "1"),
    )
    with certificate.open("a", encoding="ascii") as file:  # behind the key
        file.write(signed)
    return own, certificate


def _openssl(*arguments: str) -> str:
    done = subprocess.run([require("openssl"), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
