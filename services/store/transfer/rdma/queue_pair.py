"""A reliable connected queue pair: made, joined to one of a peer, posted to in batches, destroyed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.store.transfer.rdma.nic import PORT, Nic
from services.store.transfer.rdma.verbs import (
    CAN_READ,
    CAN_WRITE,
    LOCAL_WRITE,
    RC,
    REMOTE_READ,
    REMOTE_WRITE,
    SIGNALED,
    STATE,
    STATE_READY_TO_SEND,
    WITH_PD,
    WITH_SEND_OPS,
)
from shared.errors import NoTransport

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


class Side(msgspec.Struct, frozen=True):
    """One end of a connection, as the other end has to know it."""

    gid: str
    lid: int
    pair: int
    sequence: int
    mtu: int
    reads: int


class Work(NamedTuple):
    """One READ or WRITE of ``length`` bytes of one memory region at each end."""

    id: int
    write: bool
    local: int
    local_key: int
    remote: int
    remote_key: int
    length: int


class QueuePair:
    """Belongs to one NIC. ``allow``: what the peer may do over it (0: nothing, it only answers us). Raises NoTransport
    where the NIC has no more."""

    def __init__(self, nic: Nic, allow: int) -> None:
        self.nic = nic
        self._allow = allow
        self._sequence = secrets.randbits(24)
        verbs = nic.verbs
        depth = min(DEPTH, nic.limits.max_qp_wr)
        self.depth = depth
        try:
            wanted = verbs.QPInitAttrEx(
                qp_type=RC,
                scq=nic.cq,
                rcq=nic.cq,
                cap=verbs.QPCap(max_send_wr=depth, max_recv_wr=1),
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
        return Side(nic.gid.text, nic.lid, self.number, self._sequence, nic.mtu, nic.reads)

    def join(self, other: Side) -> None:
        """Connect; ready to carry when the other end has joined too. Raises NoTransport."""
        verbs, nic = self.nic.verbs, self.nic
        attr = verbs.QPAttr(port_num=PORT)
        attr.qp_access_flags = self._allow
        attr.path_mtu = min(nic.mtu, other.mtu)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = other.pair, other.sequence, self._sequence
        attr.max_rd_atomic = attr.max_dest_rd_atomic = min(nic.reads, other.reads)
        attr.min_rnr_timer, attr.timeout = RECEIVER_NOT_READY, TIMEOUT
        attr.retry_cnt = attr.rnr_retry = RETRIES
        try:
            route = verbs.GlobalRoute(dgid=verbs.GID(other.gid), sgid_index=nic.gid.number, hop_limit=HOPS)
            attr.ah_attr = verbs.AHAttr(port_num=PORT, is_global=1, gr=route, dlid=other.lid)
            self._qp.to_rts(attr)
        except (verbs.Error, OverflowError, ValueError) as e:
            raise NoTransport(f"{nic.name} cannot be joined to {other.gid}: {e}") from e

    def post(self, works: Sequence[Work]) -> None:
        """All in one go. Only some and the last are announced when done: they are done in order, so each stands for all
        before it; a failure is always announced. Raises NoTransport: none was posted."""
        qp, sge = self._qp, self._sge
        last, since, size = len(works) - 1, 0, 0
        try:
            qp.wr_start()
            for index, work in enumerate(works):
                qp.wr_id = work.id
                since, size = since + 1, size + work.length
                announced = index == last or since >= ANNOUNCED or size >= ANNOUNCED_BYTES
                qp.wr_flags = SIGNALED if announced else 0
                if announced:
                    since = size = 0
                if work.write:
                    qp.wr_rdma_write(work.remote_key, work.remote)
                else:
                    qp.wr_rdma_read(work.remote_key, work.remote)
                sge.addr, sge.length, sge.lkey = work.local, work.length, work.local_key
                qp.wr_set_sge(sge)
            qp.wr_complete()
        except self.nic.verbs.Error as e:
            raise NoTransport(f"posting on {self.nic.name} failed: {e}") from e

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


MAY_BE_READ = LOCAL_WRITE | REMOTE_READ
MAY_BE_USED = LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE
