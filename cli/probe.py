"""Is somebody there? Quick looks at NATS, Redis and HTTP servers, each with a deadline."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

PORTS = {"nats": 4222, "tls": 4222, "redis": 6379, "rediss": 6379, "http": 80, "https": 443}
HELLO = {"redis": b"PING\r\n"}
GREETING = {"nats": (b"INFO ",), "redis": (b"+PONG", b"-NOAUTH", b"-NOPERM")}


def why_unreachable(url: str, timeout: float = 1.0) -> str:
    """Why the server behind ``url`` does not answer; "" when it does. Of several with commas, one is enough."""
    reasons = [_why_one(one.strip(), timeout) for one in url.split(",")]
    return "" if "" in reasons else "; ".join(reasons)


def _why_one(url: str, timeout: float) -> str:
    parts = urlsplit(url)
    try:
        port = parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        return "its port is no number below 65536"
    if not parts.hostname or not port:
        return "it has no host and port"
    try:
        with socket.create_connection((parts.hostname, port), timeout) as probe:
            return _greet(probe, parts.scheme)
    except OSError as error:
        return error.strerror or str(error)


def _greet(probe: socket.socket, scheme: str) -> str:
    """TLS and HTTP servers do not speak first: that they accept is enough here."""
    if scheme not in GREETING:
        return ""
    probe.sendall(HELLO.get(scheme, b""))
    return "" if probe.recv(64).startswith(GREETING[scheme]) else f"what listens there is no {scheme} server"


def why_not_bindable(host: str, port: int) -> str:
    """Why a server could not listen there; "" when it could."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"{host} is no address of this machine ({error.strerror})"
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                return error.strerror or str(error)
    return ""
