"""The endpoints of an agent, one for each peer it talks to, and how many of them are connected."""

from __future__ import annotations

import asyncio

from services.store.transfer.endpoint import Assign, Endpoint, Local
from services.store.transfer.endpoints import EndpointPool
from shared.errors import MooncakeError
from shared.messages import Ref

AT_CAP = 0.02


class Peers:
    """Lives on the loop."""

    def __init__(self, local: Local, cap: int, assign: Assign) -> None:
        self._local = local
        self._assign = assign
        self._endpoints: dict[Ref, Endpoint] = {}
        self._pool: EndpointPool[Ref] = EndpointPool(cap)

    def get(self, ref: Ref) -> Endpoint:
        """Made on first use, connected when there is something to carry."""
        endpoint = self._endpoints.get(ref)
        if endpoint is None:
            self._bury()
            endpoint = self._endpoints[ref] = Endpoint(ref, self._local, self._assign, self._room)
        self._pool.touch(ref)
        return endpoint

    def known(self, ref: Ref) -> Endpoint | None:
        """From any thread."""
        return self._endpoints.get(ref)

    def _bury(self) -> None:
        """Forget peers that were found to be another incarnation: what they refused need not be remembered."""
        for ref, endpoint in list(self._endpoints.items()):
            if endpoint.over and not endpoint.busy():
                endpoint.disconnect()
                self._pool.remove(ref)
                del self._endpoints[ref]

    async def _room(self, endpoint: Endpoint) -> None:
        """Admit an endpoint to the pool, disconnecting an idle one where the cap asks for it."""
        while True:
            admitted, victim = self._pool.admit(endpoint.ref, lambda ref: self._endpoints[ref].busy())
            if victim is not None:
                self._endpoints[victim].disconnect()
            if admitted:
                return
            await asyncio.sleep(AT_CAP)

    def connections(self) -> int:
        return sum(endpoint.connections() for endpoint in self._endpoints.values())

    async def close(self, error: MooncakeError) -> None:
        for endpoint in list(self._endpoints.values()):
            await endpoint.close(error)
