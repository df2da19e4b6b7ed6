"""Which transports may carry a request, in which order: ``prefer:shm,rdma,tcp`` or ``require:rdma``."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError

KNOWN = ("shm", "rdma", "tcp")
DEFAULT = ("shm", "tcp")


@dataclass(frozen=True)
class TransportPolicy:
    """``order``: transports to try, best first. ``require``: only the first one will do, else NoTransport.

    With ``prefer`` the next one is taken where the first cannot reach a peer; which one carried a request is in
    its Result and in the metrics, so a second choice is never silent.
    """

    order: tuple[str, ...] = DEFAULT
    require: bool = False

    def reads_over_tcp(self, same_host: bool) -> bool:
        """A READ of that peer goes over TCP at once, no other transport is tried before."""
        first = next((name for name in self.order if name != "shm" or same_host or self.require), "")
        return first == "tcp"

    @staticmethod
    def parse(text: str) -> TransportPolicy:
        """Raises ConfigError naming what is allowed."""
        mode, _, names = text.partition(":")
        order = tuple(name.strip() for name in names.split(",") if name.strip())
        if mode not in ("prefer", "require") or not order or len(set(order)) != len(order):
            raise ConfigError(f"transport policy {text!r} is not prefer:A,B or require:A", field="transports")
        if unknown := [name for name in order if name not in KNOWN]:
            raise ConfigError(f"unknown transport {unknown[0]!r}; known are {', '.join(KNOWN)}", field="transports")
        if mode == "require" and len(order) != 1:
            raise ConfigError(f"transport policy {text!r}: require takes exactly one transport", field="transports")
        return TransportPolicy(order, mode == "require")
