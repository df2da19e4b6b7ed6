"""One RDMA device of this machine, opened: its port, its completions, its memory regions and queue pairs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from services.store.transfer.rdma.gids import Gid, rank
from services.store.transfer.rdma.verbs import PORT_ACTIVE, SOFT_ROCE, Verbs
from shared.errors import NoTransport
from shared.telemetry import log

if TYPE_CHECKING:
    from pyverbs.mr import MR

PORT = 1
LEAST = 8
"""Work requests that a queue pair is worth having for."""
GIDS = 256
READS = 16
"""RDMA READs in flight on a queue pair at most, where the device takes so many."""
UNBOUNDED = 1 << 62
SOFT_WINDOW = 512 << 10
"""Soft-RoCE answers READs as fast as it can make packets: what a network queue of 1,000 has no room for is lost,
and asked for again after a time-out of 268 ms."""

logger = log("transfer.rdma")


class Completion(NamedTuple):
    """``pair``: the queue pair's number on the NIC."""

    pair: int
    work: int
    status: int


class Destroyable(Protocol):
    def end(self) -> None: ...


class Nic:
    """Owns the device's context and all that is made on it; lives on the loop. ``completions``: work requests that may
    be posted on its queue pairs together. Raises NoTransport where the device cannot be used.

    Each work request of a queue pair that breaks is announced, and a completion queue without room for that fails with
    all queue pairs on it: so each pair has its share of the room (``take``) for as long as it lives.

    ``failed``: the device said so, or does not do what it has to; ``lost``: it is closed, not to be touched any more;
    ``ready``: all memory is registered; ``reset``: queue pairs that are to be destroyed yet,
    ``calm``: for how many looks the port has been up meanwhile. ``opened`` tells this
    opening of it from any other.
    """

    def __init__(self, verbs: Verbs, name: str, completions: int) -> None:
        self.verbs = verbs
        self.name = name
        self.moved = {"read": 0, "write": 0}
        self.broken = 0
        self.failed = self.lost = False
        self.ready = True
        self.reset: list[Destroyable] = []
        self.calm = 0
        self.opened = secrets.randbits(31)
        self._completions = completions
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
        self.gids = self._ranked_gids()
        logger.info("address chosen", nic=self.name, gid=str(self.gid), others=[str(gid) for gid in self.gids[1:]])
        self.pd = verbs.PD(self.context)
        before = _event_files()
        self._channel = verbs.CompChannel(self.context)
        (self.fd,) = _event_files() - before
        os.set_blocking(self.fd, False)
        self._room = max(LEAST, min(self._completions, self.limits.max_cqe))
        self.cq = verbs.CQ(self.context, self._room, None, self._channel, 0)
        self.cq.req_notify()

    def _ranked_gids(self) -> list[Gid]:
        try:
            table = self.context.query_gid_table(GIDS)
        except self.verbs.Error as e:
            raise NoTransport(f"the addresses of RDMA device {self.name} cannot be read: {e}") from e
        ranked = rank(Gid(g.gid_index, g.gid_str(), g.gid_type) for g in table if g.port_num == PORT)
        if not ranked:
            raise NoTransport(f"RDMA device {self.name} has no address (GID)")
        return ranked

    @property
    def gid(self) -> Gid:
        """The one that peers are told first."""
        return self.gids[0]

    def readdressed(self) -> bool:
        """Look at the addresses again: whether they have changed. Where there is none left the old ones stay: nobody
        can be reached with them, as they find out."""
        try:
            gids = self._ranked_gids()
        except NoTransport as e:
            logger.warning("the address is gone", nic=self.name, error=e.message)
            return False
        if gids == self.gids:
            return False
        self.gids = gids
        logger.warning("the address has changed", nic=self.name, gid=str(self.gid))
        return True

    def take(self, most: int) -> int:
        """Room for up to ``most`` work requests, to be given back. Raises NoTransport where there is next to none."""
        room = min(most, self._room, self.limits.max_qp_wr)
        if room < LEAST:
            raise NoTransport(f"the completion queue of {self.name} has room for {self._room} more work requests")
        self._room -= room
        return room

    def give(self, room: int) -> None:
        self._room += room

    @property
    def misreports(self) -> bool:
        """Soft-RoCE (Linux 6.1) announces a READ as done when the answer to its retry comes in the middle of it; its
        queue pair is broken then, and bytes are missing. Whoever believes a completion looks at the pair first."""
        return self.limits.vendor_id == SOFT_ROCE

    @property
    def reads(self) -> int:
        """RDMA READs that a queue pair here may have in flight, in either direction."""
        return max(1, min(READS, self.limits.max_qp_rd_atom, self.limits.max_qp_init_rd_atom))

    @property
    def window(self) -> int:
        """Bytes that a queue pair here may have asked for by READs and not got yet."""
        return SOFT_WINDOW if self.misreports else UNBOUNDED

    def active(self) -> bool:
        """The port is up, as far as the device knows."""
        if self.failed or self.lost or not self.ready:
            return False
        try:
            return self.context.query_port(PORT).state == PORT_ACTIVE
        except self.verbs.Error:
            return False

    def bury(self) -> None:
        """Destroy what was only reset so far."""
        while self.reset:
            self.reset.pop().end()

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
        self.bury()
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
