"""What peers may read and write, decided at this agent. Called on transport threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from services.store.slab import Slab
from shared.errors import NotPermitted, NotRegistered
from shared.messages import Ref


class StoreGuard:
    """READ: a slot of the generation that the grant names. WRITE: slots of the open landing whose token it names.
    ``slabs`` grows while transports ask."""

    def __init__(self, slabs: Mapping[str, Slab]) -> None:
        self._slabs = slabs

    def reading(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        slab = self._slab(segment)
        slots = covered(slab, offset, length)
        if len(slots) != 1:
            raise NotPermitted("a read goes over the end of its slot")
        return slab.pins.pin(slots[0], grant)

    def writing(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        slab = self._slab(segment)
        return slab.grants.write(grant, peer, covered(slab, offset, length))

    def generation(self, segment: str, offset: int) -> int:
        slab = self._slab(segment)
        return slab.pins.generation(covered(slab, offset, 1)[0])

    def live_grants(self, peer: Ref) -> Sequence[int]:
        return [token for slab in tuple(self._slabs.values()) for token in slab.grants.tokens(peer)]

    def granted(self, peer: Ref, segment: str, grant: int) -> Sequence[tuple[int, int]]:
        slab = self._slab(segment)
        stride = slab.memory.stride
        return [(slot * stride, (slot + 1) * stride) for slot in sorted(slab.grants.slots(grant, peer))]

    def _slab(self, segment: str) -> Slab:
        slab = self._slabs.get(segment)
        if slab is None:
            raise NotRegistered(f"no segment {segment} here", field="segment")
        return slab


def covered(slab: Slab, offset: int, length: int) -> range:
    """Slots that [offset, offset + length) touches. Raises NotPermitted outside the slab and between slots."""
    stride = slab.memory.stride
    if length <= 0 or offset < 0 or offset + length > slab.memory.size:
        raise NotPermitted(f"[{offset}, {offset}+{length}) is not inside the slab")
    first, last = offset // stride, (offset + length - 1) // stride
    return range(first, last + 1)
