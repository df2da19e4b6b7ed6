"""Towards one incarnation of a peer: what is posted, what has arrived, and what a broken queue pair leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from services.store.transfer.batches import Job, Slice
from services.store.transfer.endpoint import Endpoint
from services.store.transfer.rdma.cargo import Cargo, works
from services.store.transfer.rdma.checks import Checks
from services.store.transfer.rdma.connections import Connections
from services.store.transfer.rdma.knowledge import Knowledge
from services.store.transfer.rdma.messages import Call, pack, unpack_answer
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.queue_pair import QueuePair
from services.store.transfer.rdma.reaper import Reaper
from services.store.transfer.rdma.traffic import Lane, Traffic
from services.store.transfer.topology.health import Fault
from services.store.transfer.topology.paths import Nics, Paths
from services.store.transfer.wire import Kind
from shared.errors import MooncakeError, NoTransport, PeerGone, StaleIncarnation

AT_ONCE = 32
"""Work requests that are posted on a lane before the loop has its turn again."""
STALLED = 3.0
"""Seconds without a completion after which a lane in use counts as broken, whatever its device says."""


class Pairs(Protocol):
    """Where completions find their lane, and how many queue pairs there may be."""

    def joined(self, outgoing: Outgoing, lane: Lane) -> None: ...

    def gone(self, lane: Lane) -> None: ...


class Outgoing:
    """Lives on the loop; takes the engine's lock where jobs and grants are touched."""

    def __init__(
        self,
        endpoint: Endpoint,
        nics: Mapping[str, Nic],
        here: Nics,
        checks: Checks,
        pairs: Pairs,
        ask_owner: Callable[[Slice], None],
        timeout: float,
    ) -> None:
        self.endpoint = endpoint
        self.knowledge = Knowledge()
        self.traffic: Traffic | None = None
        self._lock = endpoint.link.work  # a condition over the engine's lock
        self._here = here
        self._checks = checks
        self._registry = pairs
        self._ask_owner = ask_owner
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._reaper = Reaper(self.call, self._unreaped, self._reaped, self.give_up)
        self._connections = Connections(self, nics, self._reaper, pairs)
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False

    @property
    def pairs(self) -> Mapping[Lane, QueuePair]:
        return self._connections.pairs

    async def call(self, call: Call, kind: Any, timeout: float = 0.0) -> Any:
        """Raises PeerGone, DeadlineExceeded, StaleIncarnation, and what the peer answers."""
        timeout = timeout or self._timeout
        control = await self.endpoint.control()
        return unpack_answer(await control.call(pack(call), timeout), kind)

    async def learn(self, job: Job, timeout: float) -> None:
        """Find out how a job's segment is reached. Raises NoTransport, Fenced, and what the peer answers."""

        async def ask(call: Call, kind: Any) -> Any:
            return await self.call(call, kind, timeout + self._timeout)

        await self.knowledge.learn(job, ask, timeout)
        if self.traffic is None and self.knowledge.matrix is not None:
            paths = Paths(self._here, Nics(self.knowledge.matrix), self.endpoint.ref)
            self.traffic = Traffic(paths, self.endpoint.link.ledger, _locations, self._arrived)

    # -- sending ----------------------------------------------------------------------------------------------

    def send(self, cargos: list[Cargo]) -> None:
        """Under the lock."""
        assert self.traffic is not None
        self.traffic.submit(cargos, self._loop.time())
        self._pump_soon()

    def _send_check(self, cargo: Cargo) -> None:
        self.send([cargo])

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Post what can be posted, connect what is not connected."""
        self._pumping = False
        if self.traffic is None:
            return
        for lane in list(self.traffic.lanes.values()):
            if not lane.queue:
                continue
            if (pair := self.pairs.get(lane)) is not None:
                self._post(lane, pair)
            else:
                self._connections.want(lane)
        self._wake_later()

    def _post(self, lane: Lane, pair: QueuePair) -> None:
        assert self.traffic is not None
        with self._lock:
            taken = self.traffic.take(lane, min(AT_ONCE, pair.depth - len(lane.flying)), pair.nic.window)
        if not taken:
            return
        if len(lane.flying) == len(taken):
            lane.moved = self._loop.time()
        try:
            pair.post(works(taken, lane.path, lane.number))
        except NoTransport as e:
            self.lost(lane, e, Fault.LOCAL)
        if lane.queue and len(lane.flying) < pair.depth:
            self._pump_soon()

    def _wake_later(self) -> None:
        """Cargos that wait for a NIC to have rested."""
        assert self.traffic is not None
        at = self.traffic.ready_at()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else self._loop.call_at(max(at, self._loop.time() + 0.01), self._retry)

    def _retry(self) -> None:
        assert self.traffic is not None
        with self._lock:
            self.traffic.retry(self._loop.time())
        self.pump()

    # -- completions ------------------------------------------------------------------------------------------

    def completed(self, lane: Lane, number: int) -> dict[str, int]:
        """Work requests up to ``number`` are done; the bytes that they moved, by operation."""
        assert self.traffic is not None
        with self._lock:
            moved = self.traffic.completed(lane, number)
        lane.moved = self._loop.time()
        if lane.queue:
            self._pump_soon()
        return moved

    def refused(self, lane: Lane, number: int, error: MooncakeError) -> None:
        """The peer's NIC refused one work request: it fails, the others go again."""
        assert self.traffic is not None
        with self._lock:
            for _, cargo in lane.flying:
                self.knowledge.forget(cargo.request)
            self.traffic.refused(lane, number, error)
        self.lost(lane, error, Fault.PEER)

    def _arrived(self, cargo: Cargo) -> None:
        """Under the lock. Every byte of it is where it belongs."""
        job, piece = cargo.job, cargo.piece
        if cargo.slots is not None:
            self._checks.arrived(cargo, self._send_check)
        elif cargo.write or job.error is not None or cargo.reach.check == "open":
            piece.settle(job.error)
        elif cargo.reach.check == "ask":
            piece.kind = Kind.VERIFY
            self._ask_owner(piece)
        elif job.open == 1:
            self._checks.begin(piece, cargo.reach, self._send_check)
        else:
            piece.settle()

    # -- connections (their owner) ----------------------------------------------------------------------------

    def grants(self) -> set[int]:
        """WRITE grants with something under way, on every path to the peer."""
        with self._lock:
            mine = self.traffic.grants() if self.traffic is not None else set()
            return mine | self.endpoint.link.grants()

    def wants(self, lane: Lane) -> bool:
        return self.traffic is not None and self.traffic.lanes.get(lane.path) is lane

    def joined(self, lane: Lane, pair: QueuePair) -> None:
        self._registry.joined(self, lane)
        self.pump()

    def refuse(self, grants: Iterable[int]) -> None:
        """Under no lock. Rule: writer_refuses, on every path to the peer."""
        grants = set(grants)
        with self._lock:
            self.endpoint.link.refuse(grants)
            if self.traffic is not None:
                self.traffic.refuse(grants)

    async def reopened(self, nic: str, opened: int) -> None:
        """The peer's device was opened then: where that is news, so are its keys."""
        before = self.knowledge.opened.get(nic, opened)
        if before != opened:
            await self.knowledge.refresh(self.call, self._timeout)
        self.knowledge.opened[nic] = opened

    def give_up(self, error: MooncakeError) -> None:
        if self.traffic is None:
            return
        with self._lock:
            self.traffic.fail(error)
            if isinstance(error, StaleIncarnation):
                self.endpoint.over = True
                self.traffic.bury(self._loop.time())

    # -- losing -----------------------------------------------------------------------------------------------

    def lost(self, lane: Lane, error: MooncakeError, fault: Fault | None) -> None:
        """Destroy a lane's queue pair; what it carried goes elsewhere."""
        assert self.traffic is not None
        had = self._connections.destroy(lane)
        with self._lock:
            self.traffic.broken(lane, error, fault, self._loop.time())
        if had:
            self._reaper.add(lane.number)
        self._pump_soon()

    def reap(self) -> None:
        """See to it that what waits for the peer to let go of it goes on."""
        self._reaper.soon()

    def _unreaped(self) -> list[int]:
        return list(self.traffic.unreaped) if self.traffic is not None else []

    def _reaped(self, numbers: set[int]) -> None:
        if self.traffic is None:
            return
        with self._lock:
            for number in numbers:
                self.traffic.reaped(number, self._loop.time())
        self.pump()

    # -- from outside -----------------------------------------------------------------------------------------

    def expire(self, jobs: set[Job], error: MooncakeError) -> None:
        """Under no lock. Give jobs up; when this returns nothing of them touches memory here."""
        if self.traffic is None:
            return
        with self._lock:
            over = self.traffic.expire(jobs, error)
        for lane in over:
            self.lost(lane, error, None)

    def port(self, name: str, up: bool) -> None:
        """The peer says that a port of its went up or down."""
        if self.traffic is None or name not in self.traffic.paths.there.by_name:
            return
        if up:
            self.traffic.paths.there.up(name)
            return self.pump_again()
        self.traffic.paths.there.down(name, self._loop.time())
        for lane in [lane for lane in self.traffic.lanes.values() if lane.path.remote.name == name]:
            self.lost(lane, NoTransport(f"the peer's port of {name} is down"), None)

    def look(self) -> None:
        """Lanes on which nothing moves any more."""
        for lane in list(self.pairs):
            if lane.flying and self._loop.time() - lane.moved > STALLED:
                self.lost(lane, PeerGone(f"nothing arrived over {lane.path!r} for {STALLED:g} s"), Fault.LINK)

    def nic_down(self, name: str) -> None:
        """A NIC of ours reports its port as down: what flies on it is lost now, not when its retries are over."""
        if self.traffic is None:
            return
        for lane in [lane for lane in self.traffic.lanes.values() if lane.path.local.name == name]:
            self.lost(lane, NoTransport(f"the port of {name} is down"), None)

    def pump_again(self) -> None:
        """A NIC of ours is up again."""
        if self.traffic is not None and self.traffic.waiting:
            self._retry()

    @property
    def queued(self) -> int:
        """Bytes on their way to the peer, or from it."""
        return sum(nic.queued for nic in self.traffic.paths.there) if self.traffic is not None else 0

    def busy(self) -> bool:
        return self.traffic is not None and self.traffic.under_way()

    def disconnect(self) -> None:
        """Nothing is under way."""
        for lane in list(self.pairs):
            self.lost(lane, NoTransport("disconnected"), None)

    async def keep(self) -> None:
        """Tell the peer which connections there are; reap what could not be reaped before."""
        if self.traffic is not None and self.traffic.unreaped:
            self.reap()
        await self._connections.keep()

    async def close(self, error: MooncakeError) -> None:
        self._reaper.close()
        if self._timer is not None:
            self._timer.cancel()
        if self.traffic is None:
            return self._connections.close()
        with self._lock:
            jobs = {cargo.job for lane in self.traffic.lanes.values() for _, cargo in lane.flying}
            self.traffic.fail(error)
        self._connections.close()
        with self._lock:
            for job in jobs:
                job.error = job.error or error
            for lane in list(self.traffic.lanes.values()):
                self.traffic.broken(lane, error, None, self._loop.time())
            self.traffic.fail(error)


def _locations(cargo: Cargo) -> tuple[str, str]:
    return (cargo.job.local.location if cargo.job.local is not None else ""), cargo.reach.location
