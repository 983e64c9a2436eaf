"""Connections to other machines that TLS does not secure, by what their sockets are connected to.

Settings don't tell: names have many spellings, the driver reads variables of its own, and brokers
name each other.
"""

import logging
import ssl
from typing import Any

from onceward.server_settings import is_loopback

log = logging.getLogger(__name__)

unsecured: dict[str, str] = {}
"""Those that this process has opened: what is wrong, and what to set."""
warns = False
"""Whether each is logged, too, as in a process that runs. Commands leave that to the doctor."""


def note(transport: Any, server: str, advice: str) -> None:
    """Note a new connection to `server` if it needs TLS; TLS without verification does not count.

    `advice` is what to set.
    """
    peer, tls = transport.get_extra_info("peername"), transport.get_extra_info("ssl_object")
    is_verified = tls is not None and tls.context.verify_mode == ssl.CERT_REQUIRED
    # The peer of a Unix socket is a path.
    if is_verified or not isinstance(peer, tuple) or is_loopback(peer[0]):
        return
    found = f"connections to {server} are not secured by TLS"
    if warns and found not in unsecured:
        log.warning("%s: %s", found, advice)
    unsecured[found] = advice
