"""Free ports, and checks whether a server serves on a port."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import time
from pathlib import Path

from servers.state import cache_folder

LOOPBACK = "127.0.0.1"
# Longest time between printing a port for a service and the service's start.
CLAIM_SECONDS = 60.0


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # Without it, a port with recently closed connections could not be bound.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    # With it, macOS allows binding one address of a port that a server has on all addresses.
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) != 0


def free_port() -> int:
    # Below the kernel's range for outgoing connections: there, a client that retries a stopped
    # server could get the server's own port as its local port and block the restart.
    while True:
        port = random.randint(15000, 29999)
        if port_is_free(port):
            return port


def keep_or_pick(ports: list[int], count: int) -> list[int]:
    picked = [port if port_is_free(port) else free_port() for port in ports]
    while len(picked) < count or len(set(picked)) < len(picked):
        picked = [*dict.fromkeys(picked), free_port()]
    return picked


def port_for_service(default: int, project: Path) -> int:
    """Return `default` if it is free and was not just given to another project, else a free port.

    Two services may start at once, and a service binds its port some seconds after this call.
    """
    if not port_is_free(default):
        return free_port()
    folder = cache_folder() / "ports"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / str(default)).open("a+") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX)
            claim.seek(0)
            claimant = claim.read()
            age = time.time() - os.fstat(claim.fileno()).st_mtime
            if claimant not in ("", str(project)) and age < CLAIM_SECONDS:
                return free_port()
            claim.truncate(0)
            claim.write(str(project))
    except OSError:
        pass  # Claims can't be stored: use the port that is free now.
    return default


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 65536))
        if not chunk:
            raise ConnectionError("closed")
        data += chunk
    return data


def postgres_answers(host: str, port: int) -> bool:
    """Begin a session and read the server's first reply, like pg_isready."""
    protocol = 196608  # 3.0
    parameters = b"user\0service\0database\0service\0\0"
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            connection.sendall(struct.pack(">ii", 8 + len(parameters), protocol) + parameters)
            kind, size = struct.unpack(">ci", receive(connection, 5))
            reply = receive(connection, size - 4)
    except (OSError, struct.error):
        return False
    # SQLSTATE class 57P: starting up, recovering or shutting down. Any other error is from a
    # server that serves.
    return kind == b"R" or (kind == b"E" and b"\0C57P" not in reply)


def kafka_answers(host: str, port: int, *, with_groups: bool) -> bool:
    """Request the API versions or, `with_groups`, the coordinator of a group.

    A broker answers the former before it is registered with the controller, when topics can't be
    created yet. The latter needs the offsets topic, which the first such request creates; before,
    clients log warnings.
    """
    api, body = (10, struct.pack(">h5s", 5, b"stack")) if with_groups else (18, b"")
    request = struct.pack(">hhih5s", api, 0, 1, 5, b"stack") + body
    try:
        with socket.create_connection((host, port), timeout=2) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            (size,) = struct.unpack(">i", receive(connection, 4))
            (error,) = struct.unpack_from(">h", receive(connection, size), 4)
    except (OSError, struct.error):
        return False
    return error == 0 or not with_groups
