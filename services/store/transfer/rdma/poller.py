"""Completions: from the NICs' channels to the lanes they are of, a bounded number at a time."""

from __future__ import annotations

import asyncio

from services.store.transfer.endpoints import EndpointPool
from services.store.transfer.rdma.metrics import NIC_BYTES, NIC_ERRORS
from services.store.transfer.rdma.nic import Completion, Nic
from services.store.transfer.rdma.outgoing import Outgoing
from services.store.transfer.rdma.traffic import Lane
from services.store.transfer.rdma.verbs import (
    LOC_PROT_ERR,
    REM_ACCESS_ERR,
    REM_INV_REQ_ERR,
    REM_OP_ERR,
    SUCCESS,
    status_name,
)
from services.store.transfer.topology.health import Fault
from shared.errors import InternalError, NotPermitted, PeerGone
from shared.telemetry import log

AT_ONCE = 4
"""Completions that are dealt with before the loop has its turn again."""
REFUSED = (REM_ACCESS_ERR, REM_INV_REQ_ERR, REM_OP_ERR)

logger = log("transfer.rdma")


class Poller:
    """On the loop, asleep while the channels say nothing. ``cap``: queue pairs to peers at most; an idle one is
    disconnected for a new one."""

    def __init__(self, cap: int) -> None:
        self._lanes: dict[int, tuple[Outgoing, Lane]] = {}
        self._pool: EndpointPool[int] = EndpointPool(cap)

    def watch(self, nic: Nic) -> None:
        asyncio.get_running_loop().add_reader(nic.fd, self._readable, nic)

    def leave(self, nic: Nic) -> None:
        asyncio.get_running_loop().remove_reader(nic.fd)

    # -- lanes ------------------------------------------------------------------------------------------------

    def joined(self, outgoing: Outgoing, lane: Lane) -> None:
        self._lanes[lane.number] = outgoing, lane
        _, victim = self._pool.admit(lane.number, self._busy)
        if victim is not None and (entry := self._lanes.get(victim)) is not None:
            entry[0].lost(entry[1], PeerGone("disconnected for another"), None)

    def _busy(self, number: int) -> bool:
        entry = self._lanes.get(number)
        return entry is not None and len(entry[1]) > 0

    def gone(self, lane: Lane) -> None:
        self._lanes.pop(lane.number, None)
        self._pool.remove(lane.number)

    # -- completions ------------------------------------------------------------------------------------------

    def _readable(self, nic: Nic) -> None:
        if not nic.lost:
            nic.rearm()
            self._drain(nic)

    def _drain(self, nic: Nic) -> None:
        if nic.lost:
            return
        completions = nic.drain(AT_ONCE)
        if nic.misreports:
            self._look_at({completion.work >> 32 for completion in completions if completion.status == SUCCESS})
        for completion in completions:
            entry = self._lanes.get(completion.work >> 32)
            if entry is not None:  # else of a queue pair that is no more
                self._one(nic, *entry, completion)
        if len(completions) == AT_ONCE:
            asyncio.get_running_loop().call_soon(self._drain, nic)

    def _look_at(self, numbers: set[int]) -> None:
        """What broken queue pairs announced is not believed."""
        for outgoing, lane in [self._lanes[number] for number in numbers if number in self._lanes]:
            pair = outgoing.pairs.get(lane)
            if pair is not None and not pair.working():
                logger.info("a queue pair broke", peer=outgoing.endpoint.ref.id, path=repr(lane.path), status="unnamed")
                outgoing.lost(lane, PeerGone(f"{lane.path!r} failed"), Fault.LINK)

    def _one(self, nic: Nic, outgoing: Outgoing, lane: Lane, completion: Completion) -> None:
        number, status = completion.work & 0xFFFFFFFF, completion.status
        if status == SUCCESS:
            self._pool.touch(lane.number)
            for op, moved in outgoing.completed(lane, number).items():
                nic.moved[op] += moved
                NIC_BYTES.labels(nic.name, op).inc(moved)
            return
        name = status_name(status)
        nic.broken += 1
        NIC_ERRORS.labels(nic.name, name).inc()
        logger.info("a queue pair broke", peer=outgoing.endpoint.ref.id, path=repr(lane.path), status=name)
        if status in REFUSED:
            outgoing.refused(lane, number, NotPermitted(f"the peer's NIC refused the range: {name}"))
        elif status == LOC_PROT_ERR:
            outgoing.refused(lane, number, InternalError(f"{nic.name} refused our own memory: {name}"))
        else:
            fault = Fault.LINK if nic.active() else Fault.LOCAL
            outgoing.lost(lane, PeerGone(f"{lane.path!r} failed: {name}"), fault)
