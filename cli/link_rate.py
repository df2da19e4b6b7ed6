"""How fast KV comes from another node: what is said, what a running mesh has measured, or TCP on this machine."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from statistics import median

from cli.api import Api, ApiError

BYTES = 512 << 20
PIECE = 1 << 20
TIMEOUT = 60.0


@dataclass(frozen=True)
class LinkRate:
    """Bytes per second, and where that is from."""

    rate: float
    source: str


def link_rate(said: float | None, url: str, key: str) -> LinkRate:
    """The first that there is."""
    if said is not None:
        return LinkRate(said, "as given")
    return _of_mesh(url, key) or LinkRate(loopback_rate(), "TCP on this machine, one connection")


def _of_mesh(url: str, key: str) -> LinkRate | None:
    """The median of what the agents of a mesh have measured; None where none answers, or nothing was moved yet."""
    try:
        cluster = Api(url, key, 5.0).get("/cluster")
        rates = [float(agent["rate"]) for agent in cluster["agents"] if agent["rate"]]
    except (ApiError, KeyError, TypeError, ValueError):
        return None
    return LinkRate(median(rates), f"measured by the store agents at {url}") if rates else None


def loopback_rate(count: int = BYTES) -> float:
    """Bytes per second over one TCP connection of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        sender = threading.Thread(target=_send, args=(server.getsockname(), count), daemon=True)
        sender.start()
        connection, _ = server.accept()
        with connection:
            connection.settimeout(TIMEOUT)
            room, left, begun = memoryview(bytearray(PIECE)), count, time.perf_counter()
            while left > 0 and (got := connection.recv_into(room)):
                left -= got
            seconds = time.perf_counter() - begun
        sender.join(TIMEOUT)
    return (count - left) / seconds


def _send(address: tuple[str, int], count: int) -> None:
    with socket.create_connection(address, TIMEOUT) as connection:
        piece = bytes(PIECE)
        for _ in range(count // PIECE):
            connection.sendall(piece)
