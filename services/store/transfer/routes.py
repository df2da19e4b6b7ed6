"""Which transport carries a request: the policy, tried against what this peer and these segments allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.store.transfer.base import Op, Peer
from services.store.transfer.batches import Job, Slice
from services.store.transfer.endpoint import Endpoint
from services.store.transfer.mapping import Mapping, Mappings
from services.store.transfer.metrics import SECOND_CHOICE
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.rdma.reach import Reach
from services.store.transfer.rdma.transport import Rdma
from services.store.transfer.threads import off_loop
from services.store.transfer.wire import Kind, SegmentRef
from shared.errors import Fenced, MooncakeError, NoTransport, NotRegistered

REGISTERING = 1.0
PATIENCE = 60.0
"""Seconds to wait for memory to be registered, where there is another transport and where there is none."""

KINDS = {
    (Op.READ, False): Kind.READ,
    (Op.WRITE, False): Kind.WRITE,
    (Op.READ, True): Kind.COPY,
    (Op.WRITE, True): Kind.PULL,
}


@dataclass(frozen=True)
class Route:
    transport: str
    mapping: Mapping | None = None
    reach: Reach | None = None

    def slices(self, job: Job, pieces: Iterable[tuple[int, int]]) -> list[Slice]:
        """The (offset, length) ``pieces`` of a job that goes by this route from here on."""
        job.transport, job.mapping = self.transport, self.mapping
        request, mapped = job.request, self.transport == "shm"
        kind = KINDS[request.op, mapped]
        target = SegmentRef(request.segment, self.mapping.shape.instance if self.mapping else 0)
        slices = [Slice(job, kind, at, length, target) for at, length in pieces]
        if kind is Kind.PULL and job.local is not None:
            for piece in slices:
                piece.source = SegmentRef(job.local.name, job.local.instance)
        return slices


Refused = dict[str, MooncakeError]
"""Transport -> why it cannot be had, although it was asked for."""


class Routes:
    """``pullable`` says whether a peer could map our segments so far."""

    def __init__(self, policy: TransportPolicy, mappings: Mappings, host_id: str, rdma: Rdma) -> None:
        self.policy = policy
        self._mappings = mappings
        self._host_id = host_id
        self._rdma = rdma

    def now(self, peer: Peer, job: Job, pullable: bool) -> Route | None:
        """None: the peer has to be asked for something first, see ``find``. Raises NoTransport, or what the one
        required transport says."""
        route = self._choose(peer, job, pullable, {})
        return route if isinstance(route, Route) else None

    async def find(self, endpoint: Endpoint, peer: Peer, job: Job, pullable: bool) -> Route:
        """As ``now``, asking the peer. Raises as it does."""
        refused: Refused = {}
        for _ in range(2 * len(self.policy.order)):
            route = self._choose(peer, job, pullable, refused)
            if isinstance(route, Route):
                return route
            try:
                await self._ask(route, endpoint, peer, job)
            except MooncakeError as e:
                refused[route] = e
        raise NotRegistered(f"segment {job.request.segment} of {peer.ref.id} is gone", field="segment")

    def _choose(self, peer: Peer, job: Job, pullable: bool, refused: Refused) -> Route | str:
        """The route, or the transport that has to be asked for first."""
        why = ""
        for place, name in enumerate(self.policy.order):
            if (error := refused.get(name)) is not None:
                if self.policy.require or isinstance(error, Fenced):  # a fence holds over every transport
                    raise error
                why = error.message
                continue
            route = self._one(name, peer, job, pullable)
            if isinstance(route, Route):
                if place:
                    SECOND_CHOICE.labels(name).inc()
                return route
            if route is None:
                return name
            why = route
        raise NoTransport(f"{' and '.join(self.policy.order)} cannot reach {peer.ref.id}: {why}")

    def _one(self, name: str, peer: Peer, job: Job, pullable: bool) -> Route | str | None:
        """The route, why there is none, or None where that is not known yet."""
        if name == "tcp":
            return Route("tcp")
        if name == "rdma":
            reach = self._rdma.route(peer.ref, job)
            return Route("rdma", reach=reach) if isinstance(reach, Reach) else reach
        return self._mapped(peer, job, pullable)

    async def _ask(self, name: str, endpoint: Endpoint, peer: Peer, job: Job) -> None:
        """Raises why it cannot be had."""
        if name == "rdma":
            return await self._rdma.learn(endpoint, job, PATIENCE if self.policy.require else REGISTERING)
        refused = await off_loop(self._attempt(peer, job.request.segment), "transfer-map", lambda _: None)
        if refused is not None:
            raise refused

    def _attempt(self, peer: Peer, segment: str) -> Callable[[], MooncakeError | None]:
        def attempt() -> MooncakeError | None:
            try:
                self._mappings.get(peer.ref, peer.shm, segment)
            except MooncakeError as e:
                if not self.policy.require:  # else there is nothing else to do than to ask again
                    self._mappings.refuse(peer.ref, segment, e)
                return e
            return None

        return attempt

    def _mapped(self, peer: Peer, job: Job, pullable: bool) -> Route | str | None:
        if not self._host_id or peer.host_id != self._host_id or not peer.shm:
            return "not on this host"
        if job.request.op is Op.WRITE:
            if not pullable or job.local is None or job.local.fd < 0:
                return "the peer cannot map the local segment"
            return Route("shm")
        known = self._mappings.known(peer.ref, job.request.segment)
        if isinstance(known, Mapping):
            return Route("shm", known)
        return known.message if known else None
