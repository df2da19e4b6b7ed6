"""Which transport carries a request: the policy, tried against what this peer and these segments allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.store.transfer.base import Op, Peer
from services.store.transfer.batches import Job
from services.store.transfer.mapping import Mapping, Mappings
from services.store.transfer.metrics import SECOND_CHOICE
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.threads import off_loop
from shared.errors import MooncakeError, NoTransport, NotRegistered


@dataclass(frozen=True)
class Route:
    transport: str
    mapping: Mapping | None = None


class Routes:
    """``pullable`` says whether a peer could map our segments so far."""

    def __init__(self, policy: TransportPolicy, mappings: Mappings, host_id: str) -> None:
        self.policy = policy
        self._mappings = mappings
        self._host_id = host_id

    def now(self, peer: Peer, job: Job, pullable: bool, refused: MooncakeError | None = None) -> Route | None:
        """None: a mapping has to be asked for first, see ``find``. ``refused``: it was, and why it cannot be had.
        Raises NoTransport, or what the one required transport says."""
        why = ""
        for place, name in enumerate(self.policy.order):
            route = Route("tcp") if name == "tcp" else self._mapped(peer, job, pullable, refused)
            if route is None or isinstance(route, Route):
                if place and route is not None:
                    SECOND_CHOICE.labels(name).inc()
                return route
            why = route
        if refused is not None and self.policy.require:
            raise refused
        raise NoTransport(f"{' and '.join(self.policy.order)} cannot reach {peer.ref.id}: {why}")

    async def find(self, peer: Peer, job: Job, pullable: bool) -> Route:
        """As ``now``, asking for the mapping. Raises as it does."""
        route = self.now(peer, job, pullable)
        if route is None:
            refused = await off_loop(self._attempt(peer, job.request.segment), "transfer-map", lambda _: None)
            route = self.now(peer, job, pullable, refused)
        if route is None:  # mapped, and already withdrawn again
            route = self.now(peer, job, pullable, NotRegistered(f"segment {job.request.segment} is gone"))
        if route is None:
            raise NoTransport(f"segment {job.request.segment} of {peer.ref.id} cannot be mapped")
        return route

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

    def _mapped(self, peer: Peer, job: Job, pullable: bool, refused: MooncakeError | None) -> Route | str | None:
        """The route, why there is none, or None where that is not known yet."""
        if not self._host_id or peer.host_id != self._host_id or not peer.shm:
            return "not on this host"
        if job.request.op is Op.WRITE:
            if not pullable or job.local is None or job.local.fd < 0:
                return "the peer cannot map the local segment"
            return Route("shm")
        known = self._mappings.known(peer.ref, job.request.segment)
        if isinstance(known, Mapping):
            return Route("shm", known)
        refused = refused or known
        return refused.message if refused else None
