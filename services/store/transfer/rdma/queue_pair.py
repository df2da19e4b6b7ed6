"""A reliable connected queue pair: made, joined to one of a peer, posted to in batches, destroyed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from services.store.transfer.rdma.gids import Gid, matching
from services.store.transfer.rdma.nic import PORT, Nic
from services.store.transfer.rdma.verbs import (
    CAN_READ,
    CAN_WRITE,
    RC,
    SIGNALED,
    STATE,
    STATE_READY_TO_SEND,
    STATE_RESET,
    WITH_PD,
    WITH_SEND_OPS,
)
from shared.errors import NoTransport
from shared.telemetry import log

DEPTH = 128
"""Work requests that may be posted on a queue pair at one time."""
ANNOUNCED, ANNOUNCED_BYTES = 16, 1 << 20
"""Of so many work requests, or bytes, at least one is announced when it is done."""
HOPS = 64
TIMEOUT = 16
"""4.096 us x 2^16 = 268 ms until a packet without an answer is sent again; RETRIES times, then the pair is broken.
Ports that go down are known at once; this is for what breaks in between, and a busy peer is not a dead one."""
RETRIES = 7
RECEIVER_NOT_READY = 12

logger = log("transfer.rdma")


class Side(msgspec.Struct, frozen=True):
    """One end of a connection, as the other end has to know it."""

    gid: str
    kind: int
    lid: int
    pair: int
    sequence: int
    mtu: int
    reads: int


Work = tuple[int, bool, int, int, int, int, int]
"""One READ or WRITE (then True) of one memory region at each end: id, write, address and key here, address and key
there, length."""


class QueuePair:
    """Belongs to one NIC. ``other``: the end that it is to be joined to, which then initiates everything; None: this
    one does. ``allow``: what the other end may do. Raises NoTransport where the NIC has no more, or cannot reach it."""

    def __init__(self, nic: Nic, other: Side | None = None, allow: int = 0) -> None:
        self.nic = nic
        self._allow = allow
        self._sequence = secrets.randbits(24)
        self.gid = nic.gid if other is None else _reaching(nic, other)
        self.depth = nic.take(DEPTH) if other is None else 0
        try:
            self._make()
        except NoTransport:
            nic.give(self.depth)
            raise

    def _make(self) -> None:
        nic, verbs = self.nic, self.nic.verbs
        try:
            wanted = verbs.QPInitAttrEx(
                qp_type=RC,
                scq=nic.cq,
                rcq=nic.cq,
                cap=verbs.QPCap(max_send_wr=max(1, self.depth), max_recv_wr=1),
                comp_mask=WITH_PD | WITH_SEND_OPS,
                pd=nic.pd,
                send_ops_flags=CAN_READ | CAN_WRITE,
            )
            self._qp = verbs.QPEx(nic.context, wanted)
        except verbs.Error as e:
            raise NoTransport(f"no queue pair on {nic.name}: {e}") from e
        self.number = self._qp.qp_num
        self._sge = verbs.SGE(0, 0, 0)

    @property
    def side(self) -> Side:
        nic = self.nic
        return Side(self.gid.text, self.gid.kind, nic.lid, self.number, self._sequence, nic.mtu, nic.reads)

    def join(self, other: Side) -> None:
        """Connect; ready to carry when the other end has joined too. Raises NoTransport."""
        verbs, nic = self.nic.verbs, self.nic
        if nic.lost:
            raise NoTransport(f"{nic.name} is gone")
        attr = verbs.QPAttr(port_num=PORT)
        attr.qp_access_flags = self._allow
        attr.path_mtu = min(nic.mtu, other.mtu)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = other.pair, other.sequence, self._sequence
        attr.max_rd_atomic = attr.max_dest_rd_atomic = min(nic.reads, other.reads)
        attr.min_rnr_timer, attr.timeout = RECEIVER_NOT_READY, TIMEOUT
        attr.retry_cnt = attr.rnr_retry = RETRIES
        try:
            route = verbs.GlobalRoute(dgid=verbs.GID(other.gid), sgid_index=self.gid.number, hop_limit=HOPS)
            attr.ah_attr = verbs.AHAttr(port_num=PORT, is_global=1, gr=route, dlid=other.lid)
            self._qp.to_rts(attr)
        except (verbs.Error, OverflowError, ValueError) as e:
            raise NoTransport(f"{nic.name} cannot be joined to {other.gid}: {e}") from e

    def post(self, works: Sequence[Work]) -> None:
        """All in one go. Only some and the last are announced when done: they are done in order, so each stands for all
        before it; a failure is always announced. Raises NoTransport: none was posted."""
        try:
            self._qp.wr_start()
            self._fill(works)
            self._ring()
        except self.nic.verbs.Error as e:
            raise NoTransport(f"posting on {self.nic.name} failed: {e}") from e

    def _fill(self, works: Sequence[Work]) -> None:
        qp, sge = self._qp, self._sge
        last, since, size = len(works) - 1, 0, 0
        for index, (id, write, local, local_key, remote, remote_key, length) in enumerate(works):
            qp.wr_id = id
            since, size = since + 1, size + length
            if index == last or since >= ANNOUNCED or size >= ANNOUNCED_BYTES:
                qp.wr_flags = SIGNALED
                since = size = 0
            else:
                qp.wr_flags = 0
            if write:
                qp.wr_rdma_write(remote_key, remote)
            else:
                qp.wr_rdma_read(remote_key, remote)
            sge.addr, sge.length, sge.lkey = local, length, local_key
            qp.wr_set_sge(sge)

    def _ring(self) -> None:
        """The device takes what was filled in: the part of posting that is not ours."""
        self._qp.wr_complete()

    def working(self) -> bool:
        """Not broken, as the device sees it."""
        try:
            return self._qp.query(STATE)[0].qp_state == STATE_READY_TO_SEND
        except self.nic.verbs.Error:
            return False

    def close(self) -> None:
        """When this returns, nothing that came over it touches memory any more. Raises NoTransport."""
        try:
            self._qp.close()
        except self.nic.verbs.Error as e:
            raise NoTransport(f"a queue pair on {self.nic.name} cannot be destroyed: {e}") from e
        self.nic.give(self.depth)
        self.depth = 0

    def leave(self) -> None:
        """As ``end``, of the end that initiates. Soft-RoCE takes 3 s to destroy a queue pair whose packets lie before a
        port that is down, and all that runs here would wait with it. There it is reset, after which it touches no
        memory either, and destroyed when the port is up again."""
        if self.nic.lost or not self.nic.misreports or self.nic.active():
            return self.end()
        try:
            self._qp.modify(self.nic.verbs.QPAttr(qp_state=STATE_RESET), STATE)
        except self.nic.verbs.Error:
            return self.end()
        self.nic.reset.append(self)
        self.nic.calm = 0

    def end(self) -> None:
        """As ``close``. A device that does not let go of a queue pair has failed: nothing is sent over it any more."""
        try:
            self.close()
        except NoTransport as e:
            logger.error("the device failed", nic=self.nic.name, error=e.message)
            self.nic.failed = True


def _reaching(nic: Nic, other: Side) -> Gid:
    gid = matching(nic.gids, other.gid, other.kind)
    if gid is None:
        raise NoTransport(f"no address of {nic.name} reaches {Gid(0, other.gid, other.kind)}")
    return gid
