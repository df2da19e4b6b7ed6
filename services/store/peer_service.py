"""Answers to the calls of other agents: this agent as the owner of blocks, as a landing's target and as a writer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any

from services.store import peer_messages as wire
from services.store.fetch_spans import describe_lease
from services.store.fetcher import Fetcher
from services.store.landing_control import LandingControl
from services.store.metrics import CORRUPT, LEASED
from services.store.replication import Replication
from services.store.slab import Slab, boottime
from services.store.streamer import Streamer
from services.store.trace_context import carried_by, traced
from shared.blocks import KEY, split_keys
from shared.engines.base import Owner, PoolClass
from shared.errors import NotRegistered, OutOfRange
from shared.messages import Ref
from shared.telemetry import log

logger = log("store.peers")

PROMOTION = 1.0
"""Seconds that a lease waits for blocks of the SSD: half of what its reader waits for the answer."""

MOST_CARRIED = 1 << 20
"""Bytes of blocks that are copied into an answer, on the loop, whatever is asked for."""

MAX_BRING = 60.0
"""Seconds that another agent may have us fetch copies."""

MAX_DRAIN = 10.0
"""Seconds that a fence may wait here, whatever it asks for."""


class PeerService:
    """``on_call`` of the transfer engine; ``peer`` has proven itself there."""

    def __init__(
        self,
        slabs: Mapping[str, Slab],
        landings: LandingControl,
        streamer: Streamer,
        fetcher: Fetcher,
        replicas: Replication,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._slabs = slabs
        self._replicas = replicas
        self._fetcher = fetcher
        self._landings = landings
        self._streamer = streamer
        self._threads = threads

    def on_call(self, peer: Ref, payload: bytes) -> Awaitable[bytes] | bytes:
        """At once where nothing has to be waited for."""
        answer = self._answer(peer, wire.decode_call(payload))
        return self._later(answer) if isawaitable(answer) else wire.encode(answer)

    @staticmethod
    async def _later(answer: Awaitable[Any]) -> bytes:
        return wire.encode(await answer)

    def _answer(self, peer: Ref, call: wire.AnyCall) -> Any:
        """The answer, or an awaitable of it."""
        match call:
            case wire.Fence():
                return self._streamer.fence(peer, call.token, within(call.timeout, MAX_DRAIN))
            case wire.Lease():
                return self._lease_traced(peer, call) if call.trace else self._lease(peer, call)
            case wire.Renew():
                return self._slab(call.segment).leases.renew(boottime(), call.id, peer)
            case wire.Release():
                return self._release(peer, self._slab(call.segment), call.ids)
            case wire.Landed():
                return self._landed(peer, call)
            case wire.Corrupt():
                return self._suspect(call)
            case wire.Remove():
                slab = self._slab(call.segment)
                return [slab.remove(key) for key in split_keys(call.keys)]
            case wire.Replicate():
                timeout = within(call.timeout, MAX_BRING)
                return self._replicas.bring(call.namespace, split_keys(call.keys), call.sources, timeout)
            case wire.Drop():
                return self._replicas.drop(self._slab(call.segment), split_keys(call.keys), call.keep)

    def _slab(self, segment: str) -> Slab:
        slab = self._slabs.get(segment)
        if slab is None:
            raise NotRegistered(f"no segment {segment} here", field="segment")
        return slab

    @staticmethod
    def _release(peer: Ref, slab: Slab, leases: Sequence[int]) -> None:
        slab.unuse([slot for lease in leases for slot in slab.leases.release(lease, peer)])

    def _landed(self, peer: Ref, call: wire.Landed) -> None:
        with traced("store.landed", carried_by(call.trace), writer=peer.id, runs=len(call.spans)) as span:
            missing = self._landings.report(self._slab(call.segment), call.token, peer, call.spans)
            span.set_attribute("mooncake.missing", missing)

    async def _lease_traced(self, peer: Ref, call: wire.Lease) -> wire.Leased:
        """The answer is made in the turn in which its bytes were copied, as without a span."""
        blocks = len(call.keys) // KEY
        with traced("store.lease", carried_by(call.trace), reader=peer.id, blocks=blocks) as span:
            answer = self._lease(peer, call)
            leased = await answer if isawaitable(answer) else answer
            describe_lease(span, leased)
            return leased

    def _lease(self, peer: Ref, call: wire.Lease) -> wire.Leased | Awaitable[wire.Leased]:
        """What is here of ``keys``, on the SSD too, is held for the reader from now on (``owner_waits``)."""
        slab = self._slabs.get(call.segment)
        keys = split_keys(call.keys)
        if slab is None:
            return self._nothing(keys)
        self._release(peer, slab, call.over)
        if any(map(slab.is_below, keys)):
            return self._lease_below(peer, call, slab, keys)
        return self._carried(call, slab, keys) or self._lease_here(peer, call, slab, keys)

    async def _lease_below(self, peer: Ref, call: wire.Lease, slab: Slab, keys: Sequence[bytes]) -> wire.Leased:
        owner = Owner("peer/" + peer.id)
        async with self._fetcher.brought_up(slab, keys, owner, PoolClass.PREFETCH, PROMOTION):
            leased = self._lease_here(peer, call, slab, keys)
            return await leased if isawaitable(leased) else leased

    @staticmethod
    def _nothing(keys: Sequence[bytes]) -> wire.Leased:
        LEASED.labels("miss").inc(len(keys))
        return wire.Leased(0, 0.0, [None] * len(keys))

    def _carried(self, call: wire.Lease, slab: Slab, keys: Sequence[bytes]) -> wire.Leased | None:
        """Whole blocks with their bytes, where they are few: copied in the turn in which they were found, so that
        nothing can happen to them in between. None where they must be leased."""
        found = [slab.pool.find(key) for key in keys]
        slots = [slot for slot in found if slot is not None]
        size = sum(slab.pool.slots[slot].length for slot in slots)
        whole = (call.first_layer, call.last_layer) == (0, slab.geometry.layers)
        if not slots or not whole or size > min(call.carry, MOST_CARRIED) or slab.checksums.awaited(slots):
            return None
        count_leased(found)
        slab.pool.slots.touch(reversed(slots), "")
        blocks = [None if slot is None else self._descriptor(slab, slot, call, carried=True) for slot in found]
        return wire.Leased(0, 0.0, blocks)

    def _lease_here(
        self, peer: Ref, call: wire.Lease, slab: Slab, keys: Sequence[bytes]
    ) -> wire.Leased | Awaitable[wire.Leased]:
        found = [slab.pool.find(key) for key in keys]
        slots = list(dict.fromkeys(slot for slot in found if slot is not None))
        if not slots:
            return self._nothing(keys)
        count_leased(found)
        if not 0 <= call.first_layer < call.last_layer <= slab.geometry.layers:
            raise OutOfRange(f"layers {call.first_layer} to {call.last_layer} of {slab.geometry.layers}")
        if slab.geometry.block_bytes and call.last_layer - call.first_layer < slab.geometry.layers:
            raise OutOfRange("a block of an opaque layout has no layers to be asked for")
        lease = slab.leases.grant(boottime(), peer, slots, sum(slab.pool.slots[slot].length for slot in slots))
        slab.use(slots)
        slab.pool.slots.touch(reversed(slots), "")

        def leased() -> wire.Leased:
            blocks = [None if slot is None else self._descriptor(slab, slot, call) for slot in found]
            return wire.Leased(lease.id, slab.leases.ttl, blocks)

        return self._summed(slab, slots, leased) if slab.checksums.awaited(slots) else leased()

    @staticmethod
    async def _summed(slab: Slab, slots: Sequence[int], leased: Callable[[], wire.Leased]) -> wire.Leased:
        """Once their checksums are known."""
        await slab.checksums.ready(slots)
        return leased()

    @staticmethod
    def _descriptor(slab: Slab, slot: int, call: wire.Lease, carried: bool = False) -> wire.Descriptor:
        s, layer_bytes = slab.pool.slots[slot], slab.geometry.layer_bytes
        whole = call.last_layer - call.first_layer == slab.geometry.layers  # all that an opaque block can be asked for
        first, last = (0, s.length) if whole else (call.first_layer * layer_bytes, call.last_layer * layer_bytes)
        last = min(last, s.length)
        offset, length = slot * slab.memory.stride + first, max(0, last - first)
        tenant, data = slab.pool.slots.tenants.of(slot), slab.memory.range(slot, s.length) if carried else None
        return wire.Descriptor(offset, length, slab.pins.generation(slot), s.checksum, s.length, s.parent, tenant, data)

    async def _suspect(self, call: wire.Corrupt) -> None:
        """Look ourselves: bytes may have been harmed on their way, too. A corrupt block leaves pool and index."""
        slab = self._slab(call.segment)
        slot = slab.pool.find(call.key)
        if slot is None or slab.pins.generation(slot) != call.generation:
            return
        s = slab.pool.slots[slot]
        loop = asyncio.get_running_loop()
        now = await loop.run_in_executor(self._threads, slab.checksums.compute, slot, call.generation, s.length)
        if now is None or s.checksum is None or now == s.checksum or slab.pool.find(call.key) != slot:
            return
        CORRUPT.labels("owned").inc()
        logger.warning("corrupt block dropped", key=call.key.hex())
        slab.remove(call.key)


def within(timeout: float, most: float) -> float:
    """A peer's time-out as this agent takes it: what is no number of seconds, NaN say, is none."""
    return min(timeout, most) if timeout > 0 else 0.0


def count_leased(found: Sequence[int | None]) -> None:
    LEASED.labels("hit").inc(len(found) - found.count(None))
    LEASED.labels("miss").inc(found.count(None))
