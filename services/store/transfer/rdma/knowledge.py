"""What this agent has learnt of a peer: its NICs, the keys of its segments, what it may write there."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from services.store.transfer.base import Op, Request
from services.store.transfer.batches import Job
from services.store.transfer.rdma.messages import Admit, Ask, Call, Facts, Keys
from services.store.transfer.rdma.reach import Reach
from services.store.transfer.topology.matrix import Matrix
from shared.errors import NotPermitted, NoTransport, ProtocolError

REMEMBERED = 1 << 12
"""Landings of a peer whose ranges are remembered; others are asked for again."""

Ranges = list[tuple[int, int]]


class Knowledge:
    """Of one incarnation of a peer. ``opened``: which opening of its devices it was that we have the keys of."""

    def __init__(self) -> None:
        self.matrix: Matrix | None = None
        self._reach: dict[tuple[str, bool], Reach] = {}
        self.opened: dict[str, int] = {}
        self._granted: OrderedDict[tuple[str, int], Ranges | None] = OrderedDict()

    def reach(self, job: Job) -> Reach | None:
        """How the job's segment is reached, if all that is needed is known."""
        if self.matrix is None or not self._admitted(job):
            return None
        return self._reach.get((job.request.segment, job.request.op is Op.WRITE))

    def _admitted(self, job: Job) -> bool:
        """It reads, or writes what its grant is known to cover."""
        request = job.request
        key = request.segment, request.grant
        if request.op is Op.READ:
            return True
        if key not in self._granted:
            return False
        ranges = self._granted[key]
        if ranges is None:
            return True
        index = bisect_right(ranges, request.offset, key=lambda known: known[0]) - 1
        return index >= 0 and request.offset + job.length <= ranges[index][1]

    async def refresh(self, call: Callable[[Call, Any], Awaitable[Any]], timeout: float) -> None:
        """A device of the peer was opened anew: take over its keys, also for what is under way. Raises what the peer
        answers."""
        for (segment, write), known in list(self._reach.items()):
            reach: Reach = await call(Keys(segment, write, timeout), Reach)
            if not known.renew(self._usable(reach.verify())):
                self._reach.pop((segment, write), None)

    def forget(self, request: Request) -> None:
        """The keys of its segment did not work."""
        for write in (False, True):
            self._reach.pop((request.segment, write), None)

    async def learn(self, job: Job, call: Callable[[Call, Any], Awaitable[Any]], timeout: float) -> None:
        """Ask the peer for what is missing. Raises NoTransport, Fenced, NotPermitted, and what the peer answers."""
        request, write = job.request, job.request.op is Op.WRITE
        if self.matrix is None:
            facts: Facts = await call(Ask(), Facts)
            self.matrix = Matrix.parse(facts.matrix, source="the peer's topology")
        if not self._admitted(job):
            self._granted[request.segment, request.grant] = await call(
                Admit(request.segment, request.grant), Ranges | None
            )
            while len(self._granted) > REMEMBERED:
                self._granted.popitem(last=False)
            if not self._admitted(job):
                raise NotPermitted("the landing does not cover this range")
        if (request.segment, write) not in self._reach:
            reach: Reach = await call(Keys(request.segment, write, timeout), Reach)
            self._reach[request.segment, write] = self._usable(reach.verify())

    def _usable(self, reach: Reach) -> Reach:
        """Raises ProtocolError, NoTransport."""
        assert self.matrix is not None
        nics = self.matrix.nics
        if not nics:
            raise NoTransport("the peer has no RDMA device")
        if any(nic not in part.keys for part in reach.parts for nic in nics):
            raise ProtocolError(f"segment {reach.name} lacks keys for a NIC")
        return reach
