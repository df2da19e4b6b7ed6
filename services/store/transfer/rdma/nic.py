"""One RDMA device of this machine, opened: its port, its completions, its memory regions and queue pairs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from services.store.transfer.rdma.gids import Gid, rank
from services.store.transfer.rdma.verbs import PORT_ACTIVE, SOFT_ROCE, Verbs
from shared.errors import NoTransport
from shared.telemetry import log

if TYPE_CHECKING:
    from pyverbs.mr import MR

PORT = 1
COMPLETIONS = 4096
GIDS = 256
READS = 16
"""RDMA READs in flight on a queue pair at most, where the device takes so many."""

logger = log("transfer.rdma")


class Completion(NamedTuple):
    """``pair``: the queue pair's number on the NIC."""

    pair: int
    work: int
    status: int


class Nic:
    """Owns the device's context and all that is made on it; lives on the loop. Raises NoTransport where the device
    cannot be used."""

    def __init__(self, verbs: Verbs, name: str) -> None:
        self.verbs = verbs
        self.name = name
        try:
            self._open()
        except verbs.Error as e:
            raise NoTransport(f"RDMA device {name} cannot be opened: {e}") from e

    def _open(self) -> None:
        verbs = self.verbs
        before = _event_files()
        self.context = verbs.Context(name=self.name)
        (self.events_fd,) = _event_files() - before  # pyverbs tells neither of the two
        os.set_blocking(self.events_fd, False)
        self.limits = self.context.query_device()
        port = self.context.query_port(PORT)
        self.mtu, self.lid = port.active_mtu, port.lid
        self.gid = self._choose_gid()
        self.pd = verbs.PD(self.context)
        before = _event_files()
        self._channel = verbs.CompChannel(self.context)
        (self.fd,) = _event_files() - before
        os.set_blocking(self.fd, False)
        size = min(COMPLETIONS, self.limits.max_cqe)
        self.cq = verbs.CQ(self.context, size, None, self._channel, 0)
        self.cq.req_notify()

    def _choose_gid(self) -> Gid:
        try:
            table = self.context.query_gid_table(GIDS)
        except self.verbs.Error as e:
            raise NoTransport(f"the addresses of RDMA device {self.name} cannot be read: {e}") from e
        ranked = rank(Gid(g.gid_index, g.gid_str(), g.gid_type) for g in table if g.port_num == PORT)
        if not ranked:
            raise NoTransport(f"RDMA device {self.name} has no address (GID)")
        logger.info("address chosen", nic=self.name, gid=str(ranked[0]), others=[str(gid) for gid in ranked[1:]])
        return ranked[0]

    @property
    def misreports(self) -> bool:
        """Soft-RoCE (Linux 6.1) announces a READ as done when the answer to its retry comes in the middle of it; its
        queue pair is broken then, and bytes are missing. Whoever believes a completion looks at the pair first."""
        return self.limits.vendor_id == SOFT_ROCE

    @property
    def reads(self) -> int:
        """RDMA READs that a queue pair here may have in flight, in either direction."""
        return max(1, min(READS, self.limits.max_qp_rd_atom, self.limits.max_qp_init_rd_atom))

    def active(self) -> bool:
        """The port is up, as far as the device knows."""
        try:
            return self.context.query_port(PORT).state == PORT_ACTIVE
        except self.verbs.Error:
            return False

    def register(self, address: int, length: int, access: int) -> MR:
        """A memory region over memory that the caller keeps. Holds the GIL while pages are pinned: keep it small.
        Raises NoTransport."""
        try:
            return self.verbs.MR(self.pd, length, access, address)
        except self.verbs.Error as e:
            raise NoTransport(f"{length} bytes cannot be registered on {self.name}: {e} (ulimit -l?)") from e

    def drain(self, most: int) -> list[Completion]:
        """Up to ``most`` completions, never waiting."""
        return [Completion(wc.qp_num, wc.wr_id, wc.status) for wc in self.cq.poll(most)[1]]

    def rearm(self) -> None:
        """Take the notice that made ``fd`` readable and ask for the next. Poll afterwards: nothing is missed then."""
        try:
            self._channel.get_cq_event(self.cq)
            self.cq.ack_events(1)
        except self.verbs.Error:
            pass  # none there
        self.cq.req_notify()

    def events(self) -> list[int]:
        """What the device reported since it was asked last; ``events_fd`` is readable when there is something."""
        found: list[int] = []
        while True:
            try:
                event = self.context.get_async_event()
            except self.verbs.Error:
                return found
            found.append(event.event_type)
            event.ack()  # else the queue pair that it is about could not be destroyed

    def close(self) -> None:
        """Queue pairs and regions first; pyverbs closes what is left."""
        for part in (self.cq, self._channel, self.pd, self.context):
            try:
                part.close()
            except self.verbs.Error as e:
                logger.warning("closing failed", nic=self.name, error=str(e))


def _event_files() -> set[int]:
    """Descriptors of this process on which verbs announce events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in os.readlink(entry):
                found.add(int(entry.name))
        except OSError:
            continue  # closed meanwhile
    return found
