"""What this agent has learnt of a peer: its NICs, the keys of its segments, which grants are live there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from services.store.transfer.base import Op, Request
from services.store.transfer.rdma.messages import Admit, Ask, Call, Facts, Keys
from services.store.transfer.rdma.reach import Reach
from services.store.transfer.topology.matrix import Matrix
from shared.errors import Fenced, NoTransport, ProtocolError

REMEMBERED = 1 << 16


class Knowledge:
    """Of one incarnation of a peer."""

    def __init__(self) -> None:
        self.matrix: Matrix | None = None
        self._reach: dict[tuple[str, bool], Reach] = {}
        self._live: OrderedDict[int, None] = OrderedDict()
        self._any_grant = False

    def reach(self, request: Request) -> Reach | None:
        """How the request's segment is reached, if all that is needed is known."""
        if self.matrix is None or self._unknown(request):
            return None
        return self._reach.get((request.segment, request.op is Op.WRITE))

    def _unknown(self, request: Request) -> bool:
        """It writes by a grant that the peer has not been heard to honour."""
        return request.op is Op.WRITE and not self._any_grant and request.grant not in self._live

    def forget(self, segment: str) -> None:
        """Its keys did not work."""
        for write in (False, True):
            self._reach.pop((segment, write), None)

    def heard(self, live: Iterable[int] | None) -> None:
        """Grants that are live at the peer."""
        if live is None:
            self._any_grant = True
            return
        for grant in live:
            self._live[grant] = None
        while len(self._live) > REMEMBERED:
            self._live.popitem(last=False)

    async def learn(self, request: Request, call: Callable[[Call, Any], Awaitable[Any]], timeout: float) -> None:
        """Ask the peer for what is missing. Raises NoTransport, Fenced, and what the peer answers."""
        if self.matrix is None:
            facts: Facts = await call(Ask(), Facts)
            self.matrix = Matrix.parse(facts.matrix, source="the peer's topology")
        write = request.op is Op.WRITE
        if self._unknown(request):
            live: list[int] | None = await call(Admit(), list[int] | None)
            self.heard(live)
            if self._unknown(request):
                raise Fenced("no such landing is open at the peer")
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
