"""Which address of a port to use: routable RoCE v2 first, link-local last. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.store.transfer.rdma.verbs import GID_IB, GID_ROCE_V1, GID_ROCE_V2

KINDS = {GID_IB: "IB", GID_ROCE_V1: "RoCE v1", GID_ROCE_V2: "RoCE v2"}


class Gid(NamedTuple):
    """Entry ``number`` of a port's table: ``text`` is the address in IPv6 form, ``kind`` one of KINDS."""

    number: int
    text: str
    kind: int

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """As people know it: an IPv4 address where one is mapped."""
        address = ipaddress.IPv6Address(self.text)
        return address.ipv4_mapped or address

    def __str__(self) -> str:
        return f"{self.address} ({KINDS.get(self.kind, 'unknown')}, index {self.number})"


def rank(entries: Iterable[Gid]) -> list[Gid]:
    """Best first; addresses of nobody are left out.

    RoCE v2 travels in UDP and can be routed, v1 cannot. IPv4 before IPv6, since that is what fabrics are numbered with;
    link-local addresses mean something on one link only. Among equals the first of the table.
    """
    return sorted((gid for gid in entries if not gid.address.is_unspecified), key=_worth)


def matching(ranked: Sequence[Gid], text: str, kind: int) -> Gid | None:
    """Which of a port's addresses reaches that one, of the same kind and family: a RoCE v2 packet over IPv4 does not
    leave from an IPv6 address."""
    family = _family(Gid(0, text, kind))
    return next((gid for gid in ranked if gid.kind == kind and _family(gid) == family), None)


def _family(gid: Gid) -> tuple[int, bool]:
    return gid.address.version, gid.address.is_link_local


def _worth(gid: Gid) -> tuple[bool, bool, bool, bool, int]:
    address = gid.address
    return (
        address.is_link_local,
        gid.kind == GID_ROCE_V1,
        address.is_loopback,
        address.version == 6,
        gid.number,
    )
