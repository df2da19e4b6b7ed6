"""Addresses of servers as people may see them, and of this machine as others reach it."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

DISCARD = 9
"""Any port will do: a datagram socket only looks for the way."""


def shown(urls: str) -> str:
    """``urls``, several with commas, each without its user and password (and then without its scheme)."""
    return ", ".join(url.strip().rpartition("@")[2] for url in urls.split(","))


def reachable(host: str, server: str) -> str:
    """``host`` as others can reach it: where it is a wildcard (``0.0.0.0``, ``::``), the address of this machine on the
    way to ``server`` (a URL); ``host`` itself where there is none. Looks names up, and sends nothing."""
    name = urlsplit(server.split(",")[0]).hostname
    if not name or not is_wildcard(host):
        return host
    wanted = socket.AF_UNSPEC if ":" in host else socket.AF_INET
    try:
        family, kind, _, _, address = socket.getaddrinfo(name, DISCARD, wanted, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return host


def is_wildcard(host: str) -> bool:
    """Listens on every address, and names none."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
