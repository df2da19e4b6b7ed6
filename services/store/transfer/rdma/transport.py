"""RDMA as a transport of the engine: devices, registered memory, both sides, and the poller, all on the agent's loop.

pyverbs never lets go of the GIL, so a thread would gain nothing: the completion channel is one more descriptor that the
loop sleeps on. What is done for one event is bounded, so that calls and engines' sockets get their turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from services.store.transfer.base import Guard, OpenGuard
from services.store.transfer.batches import Job, Slice
from services.store.transfer.endpoint import Endpoint
from services.store.transfer.rdma import messages
from services.store.transfer.rdma.checks import Checks
from services.store.transfer.rdma.cutting import cargos_of, size_of
from services.store.transfer.rdma.devices import open_all
from services.store.transfer.rdma.hardware import Hardware
from services.store.transfer.rdma.outgoing import Outgoing
from services.store.transfer.rdma.poller import Poller
from services.store.transfer.rdma.queue_pair import DEPTH
from services.store.transfer.rdma.reach import Reach
from services.store.transfer.rdma.regions import Regions
from services.store.transfer.rdma.status import record_of, show
from services.store.transfer.rdma.target import Target
from services.store.transfer.segments import Segment
from services.store.transfer.topology.discovery import discover
from services.store.transfer.topology.matrix import Matrix
from services.store.transfer.topology.paths import Nics
from shared.errors import MooncakeError, NoTransport
from shared.messages import Ref
from shared.records import NicRecord
from shared.tasks import end
from shared.telemetry import log

TICK = 5.0
AGAIN = 2.0
WATCH = 1.0

logger = log("transfer.rdma")


class Rdma:
    """``wanted``: devices to use, all where empty; ``topology``: where they are, as discovered where None. ``pairs``:
    queue pairs to peers at most, idle ones give way. ``ask`` is called, under the engine's lock, with READ slices whose
    owner has the last word. ``endpoint``: that of a peer. ``why``: why there is no RDMA here, "" where there is."""

    def __init__(
        self,
        wanted: Sequence[str],
        topology: Matrix | None,
        guard: Guard,
        timeout: float,
        pairs: int,
        ask: Callable[[Slice], None],
        endpoint: Callable[[Ref], Endpoint],
    ) -> None:
        self.why = "RDMA is not in the transport policy"
        self._wanted = wanted
        self._topology = topology
        self._guard = guard
        self._timeout = timeout
        self._ask = ask
        self._endpoint = endpoint
        self._telling: set[asyncio.Task[None]] = set()
        self._here = Nics(Matrix())
        self._checks = Checks()
        self._poller = Poller(pairs)
        self._outgoing: dict[Ref, Outgoing] = {}
        self._early: list[Segment] = []
        self._refused: dict[Ref, tuple[float, str]] = {}
        self._regions: Regions | None = None
        self._target: Target | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._completions = pairs * DEPTH
        self._hardware = Hardware(self._poller, self._checks, self._turned, self._completions)
        self._nics = self._hardware.nics

    # -- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the devices and begin to register memory. Raises ConfigError, NoTransport; ``why`` keeps the reason."""
        try:
            nics, matrix = open_all(
                self._wanted, self._topology if self._topology is not None else discover(), self._completions
            )
            self._hardware.start(nics)
        except MooncakeError as e:
            self.why = e.message
            raise
        self.why = ""
        loop = asyncio.get_running_loop()
        self._here = Nics(matrix)
        self._regions = Regions(self._nics, type(self._guard) is OpenGuard)
        self._target = Target(self._nics, matrix, self._regions, self._guard)
        self._hardware.carries(self._regions, self._target)
        for segment in self._early:
            self._regions.add(segment)
        self._tasks = [loop.create_task(self._tick()), loop.create_task(self._watch())]
        logger.info("RDMA is on", nics=list(self._nics), topology=matrix.format())

    async def close(self, error: MooncakeError) -> None:
        if self._target is None or self._regions is None:
            return
        self.why = "this agent is closing"
        await end(*self._tasks, *self._telling)
        for outgoing in self._outgoing.values():
            await outgoing.close(error)
        self._target.close()
        await self._regions.close()
        self._hardware.close()

    async def _tick(self) -> None:
        """Peers are told which connections there are; those that say nothing any more have none."""
        while True:
            await asyncio.sleep(TICK)
            try:
                if self._target is not None:
                    self._target.look()
                await asyncio.gather(*(outgoing.keep() for outgoing in self._outgoing.values()))
            except Exception:  # who is told nothing any more destroys our connections
                logger.exception("a round of what is kept failed")

    async def _watch(self) -> None:
        """Ports are looked at now and then; and lanes, should a device never say how a work request ended."""
        while True:
            try:
                for outgoing in list(self._outgoing.values()):
                    outgoing.look()
                await self._hardware.look()
                show(self.nics())
            except Exception:  # whatever one look found, others follow
                logger.exception("a look at the devices failed")
            await asyncio.sleep(WATCH)

    def _turned(self, name: str, up: bool) -> None:
        if up:
            self._here.up(name)
        else:
            self._here.down(name, asyncio.get_running_loop().time())
        for outgoing in self._outgoing.values():
            if up:
                outgoing.pump_again()
            else:
                outgoing.nic_down(name)
        for peer in self._target.peers() if self._target is not None else ():
            task = asyncio.get_running_loop().create_task(self._tell(peer, messages.Port(name, up)))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, peer: Ref, port: messages.Port) -> None:
        """Peers that reach us by the port need not find out themselves."""
        try:
            await self._to(self._endpoint(peer)).call(port, None)
        except MooncakeError:
            pass  # they do find out

    def _told(self, peer: Ref, port: messages.Port) -> None:
        if (outgoing := self._outgoing.get(peer)) is not None:
            outgoing.port(port.nic, port.up)

    # -- memory -----------------------------------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        if self._regions is None:
            self._early.append(segment)
        else:
            self._regions.add(segment)

    async def remove(self, segment: Segment) -> None:
        """Nothing of ours is in flight on it any more; peers cannot reach it when this returns."""
        self._early = [other for other in self._early if other is not segment]
        if self._regions is not None:
            await self._regions.remove(segment.name)

    # -- as an initiator ----------------------------------------------------------------------------------------

    def route(self, ref: Ref, job: Job) -> Reach | str | None:
        """How the job's segment is reached, why it cannot be, or None: ``learn`` first."""
        if self.why or self._regions is None or job.local is None:
            return self.why or "RDMA is off"
        until, why = self._refused.get(ref, (0.0, ""))
        if until and asyncio.get_running_loop().time() < until:
            return why
        outgoing = self._outgoing.get(ref)
        if outgoing is None or outgoing.traffic is None:
            return None
        return outgoing.knowledge.reach(job) if self._regions.own(job.local).ready else None

    async def learn(self, endpoint: Endpoint, job: Job, timeout: float) -> None:
        """Wait for what ``route`` needs. Raises NoTransport and what the peer answers."""
        if self.why or self._regions is None or job.local is None:
            raise NoTransport(self.why or "RDMA is off")
        try:
            await self._regions.own(job.local).complete(timeout)
            await self._to(endpoint).learn(job, timeout)
        except NoTransport as e:  # whoever has another transport does not ask again for each request
            now = asyncio.get_running_loop().time()
            self._refused = {ref: entry for ref, entry in self._refused.items() if entry[0] > now}
            self._refused[endpoint.ref] = now + AGAIN, e.message
            raise

    def _to(self, endpoint: Endpoint) -> Outgoing:
        outgoing = self._outgoing.get(endpoint.ref)
        if outgoing is None:
            self._bury()
            outgoing = self._outgoing[endpoint.ref] = Outgoing(
                endpoint, self._nics, self._here, self._checks, self._poller, self._ask, self._timeout
            )
        return outgoing

    def _bury(self) -> None:
        for ref, outgoing in list(self._outgoing.items()):
            if outgoing.endpoint.over and not outgoing.busy():
                outgoing.disconnect()
                del self._outgoing[ref]

    def send(self, ref: Ref, job: Job, reach: Reach) -> None:
        """Under the engine's lock: the job is under way from here on."""
        assert self._regions is not None and job.local is not None
        outgoing = self._outgoing[ref]
        size = size_of(job, outgoing.queued, (nic.window for nic in self._nics.values()))
        outgoing.send(cargos_of(job, self._regions.own(job.local).reach, reach, size))

    def expire(self, jobs: set[Job], error: MooncakeError) -> None:
        """Under no lock. When this returns nothing of these jobs touches memory here."""
        for ref in {job.request.peer for job in jobs}:
            if (outgoing := self._outgoing.get(ref)) is not None:
                outgoing.expire(jobs, error)

    def finished(self, job: Job) -> None:
        """Under the engine's lock."""
        self._checks.over(job)

    def refuse(self, ref: Ref, grants: Iterable[int]) -> None:
        """Under the engine's lock."""
        outgoing = self._outgoing.get(ref)
        if outgoing is not None and outgoing.traffic is not None:
            outgoing.traffic.refuse(grants)

    def drain(self, ref: Ref) -> None:
        """Somebody waits for what is in flight to ``ref``."""
        outgoing = self._outgoing.get(ref)
        if outgoing is not None and outgoing.traffic is not None and outgoing.traffic.unreaped:
            outgoing.reap()

    # -- as a target ----------------------------------------------------------------------------------------------

    async def answer(self, peer: Ref, payload: bytes) -> bytes:
        """Raises NoTransport where there is no RDMA here."""
        if self._target is None or self.why:
            raise NoTransport(f"the peer has no RDMA: {self.why}")
        call = messages.unpack(payload)
        if isinstance(call, messages.Port):
            self._told(peer, call)
            return messages.pack_answer(None)
        return messages.pack_answer(await self._target.answer(peer, call))

    def destroy(self, peer: Ref) -> None:
        """Our ends of all queue pairs of ``peer``; nothing of them can land any more when this returns."""
        if self._target is not None:
            self._target.destroy(peer)

    def nics(self) -> list[NicRecord]:
        """The devices in use, and what they did and hold."""
        pairs = Counter(lane.path.local.name for outgoing in self._outgoing.values() for lane in outgoing.pairs)
        pairs.update(self._target.held() if self._target is not None else ())
        now, up = asyncio.get_running_loop().time(), self._hardware.ports.up
        return [
            record_of(nic, self._here.by_name[name], up[name], pairs[name], now) for name, nic in self._nics.items()
        ]

    def registered(self) -> tuple[int, int]:
        """(bytes registered, bytes to register) of memory that peers may read."""
        return self._regions.progress() if self._regions is not None else (0, 0)
