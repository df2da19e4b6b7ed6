"""The store's in-memory twin: nodes of one process, whose pools are anonymous files, and a network that copies.

It keeps the promises of :class:`shared.engines.base.KVStore` (two-phase writes, holds, landings judged by layer and
token, LRU eviction of unheld blocks) without agents, sockets, leases or checksums. For tests.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.blocks import Geometry
from shared.engines.base import Fetched, Held, Kind, Landing, LandingTarget, Owner, PoolClass, PoolMap, Run
from shared.errors import AgentGone, DoesNotFit, Fenced, PeerGone, PoolFull, StaleToken
from shared.messages import Ref

POLL_S = 0.005


@dataclass
class MemoryNetwork:
    """All nodes by agent id. ``delay`` seconds are added to every stream and fetch; ``broken`` agents refuse both."""

    nodes: dict[str, MemoryNode] = field(default_factory=dict)
    delay: float = 0.0
    broken: set[str] = field(default_factory=set)
    moved: int = 0

    async def node(self, agent: str) -> MemoryNode:
        await asyncio.sleep(self.delay)
        found = self.nodes.get(agent)
        if found is None or found.dead or agent in self.broken:
            raise PeerGone(f"agent {agent} is gone")
        return found


@dataclass
class OpenLanding:
    landing: Landing
    owed: set[int]
    missing: npt.NDArray[np.bool_]  # [block, layer, token]: still to be written
    fenced: bool = False

    def left(self) -> int:
        """Layer-tokens."""
        return sum(int(self.missing[block].sum()) for block in self.owed)


class MemoryNode:
    """One agent: a pool of slots, its committed blocks (LRU order), who holds what."""

    def __init__(self, network: MemoryNetwork, name: str, geometry: Geometry, slots: int) -> None:
        self.agent = Ref(name, len(network.nodes) + 1)
        self.network, self.geometry = network, geometry
        self.dead = False
        self.fd = os.memfd_create(name)
        os.ftruncate(self.fd, slots * geometry.slot_bytes)
        self.pool = PoolMap(f"/proc/self/fd/{self.fd}", 0, geometry.slot_bytes, slots, geometry)
        self.memory = np.frombuffer(mmap.mmap(self.fd, 0), dtype=np.uint8).reshape(slots, geometry.slot_bytes)
        self.free = list(range(slots))
        self.committed: OrderedDict[bytes, int] = OrderedDict()
        self.writing: dict[bytes, int] = {}  # key -> hold of its writer (0: being fetched)
        self.key_of: dict[int, bytes] = {}
        self.refs: dict[int, int] = {}
        self.holds: dict[int, Held] = {}
        self.landings: dict[int, OpenLanding] = {}
        self.numbers = itertools.count(1)
        network.nodes[name] = self

    # -- slots -------------------------------------------------------------------------------------------------

    def available(self) -> int:
        return len(self.free) + sum(1 for slot in self.committed.values() if not self.refs.get(slot))

    def take(self, count: int) -> list[int]:
        """Free slots, evicting unheld blocks; all or nothing. Raises DoesNotFit, PoolFull."""
        if count > self.pool.slots:
            raise DoesNotFit(f"{count} slots of a pool of {self.pool.slots}")
        if count > self.available():
            raise PoolFull(f"{count} slots wanted, {self.available()} available")
        while len(self.free) < count:
            key = next(k for k, slot in self.committed.items() if not self.refs.get(slot))
            self.free.append(self._uncommit(key))
        return [self.free.pop() for _ in range(count)]

    def _uncommit(self, key: bytes) -> int:
        slot = self.committed.pop(key)
        del self.key_of[slot]
        return slot

    def hold(self, slot: int, kind: Kind, key: bytes = b"") -> Held:
        held = Held(next(self.numbers), slot, kind, key)
        if slot >= 0:
            self.refs[slot] = self.refs.get(slot, 0) + 1
            self.holds[held.hold] = held
        return held

    def present(self, key: bytes) -> Held | None:
        slot = self.committed.get(key)
        if slot is None:
            return None
        self.committed.move_to_end(key)
        return self.hold(slot, Kind.PRESENT, key)

    def let_go(self, held: Held) -> None:
        if self.holds.pop(held.hold, None) is None:
            return
        self.refs[held.slot] -= 1
        if self.writing.get(held.key) == held.hold:
            del self.writing[held.key]
        if not self.refs[held.slot] and held.slot not in self.key_of:
            self.free.append(held.slot)

    def commit(self, held: Held, key: bytes) -> Held:
        if held.hold not in self.holds:
            raise StaleToken(f"hold {held.hold} is over")
        self.writing.pop(held.key, None)
        if held.slot in self.key_of or key in self.committed:
            return held if held.slot not in self.key_of else self._mark(held, key)
        self.committed[key] = held.slot
        self.key_of[held.slot] = key
        return self._mark(held, key)

    def _mark(self, held: Held, key: bytes) -> Held:
        marked = Held(held.hold, held.slot, Kind.PRESENT, key)
        self.holds[held.hold] = marked
        return marked

    def layers(self, slot: int, run: Run) -> npt.NDArray[np.uint8]:
        """View of what ``run`` moves: [layers, bytes]."""
        size = self.geometry
        view: npt.NDArray[np.uint8] = self.memory[slot].reshape(size.layers, size.layer_bytes)
        at = slice(run.first_token * size.token_bytes, run.last_token * size.token_bytes)
        part: npt.NDArray[np.uint8] = view[run.first_layer : run.last_layer, at]
        return part

    def receive(self, token: int, runs: Sequence[Run], source: MemoryNode) -> int:
        """As the target: write runs of another node's slots into a landing. Raises Fenced."""
        entry = self.landings.get(token)
        if entry is None or entry.fenced:
            raise Fenced("the landing is fenced")
        moved = 0
        for run in runs:
            target = self.layers(entry.landing.held[run.block].slot, run)
            target[:] = source.layers(run.slot, run)
            moved += target.nbytes
            entry.missing[run.block, run.first_layer : run.last_layer, run.first_token : run.last_token] = False
        return moved

    def kill(self) -> None:
        self.dead = True


class MemoryStore:
    """A connection to a :class:`MemoryNode`; a :class:`shared.engines.base.KVStore`."""

    def __init__(self, node: MemoryNode) -> None:
        self.node = node

    @property
    def agent(self) -> Ref:
        return self.node.agent

    @property
    def pool(self) -> PoolMap:
        return self.node.pool

    @property
    def closed(self) -> bool:
        return self.node.dead

    def _alive(self) -> MemoryNode:
        if self.node.dead:
            raise AgentGone("the agent is gone")
        return self.node

    async def lease(
        self, keys: Sequence[bytes], owner: Owner, pool_class: PoolClass = PoolClass.GROWTH
    ) -> list[Held | None]:
        return [self._alive().present(key) for key in keys]

    async def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._alive().committed for key in keys]

    async def _slots(self, count: int, timeout: float) -> list[int]:
        """Wait for room until the timeout, then PoolFull."""
        await self._until(lambda: self._alive().available() >= count or count > self.pool.slots, timeout)
        return self._alive().take(count)

    async def _until(self, reached: Callable[[], bool], timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while loop.time() < until:
            if reached():
                return True
            await asyncio.sleep(POLL_S)
        return reached()

    async def reserve(self, keys: Sequence[bytes], owner: Owner, pool_class: PoolClass, timeout: float) -> list[Held]:
        node = self._alive()
        new = [k for k in keys if k not in node.committed and k not in node.writing]
        found = {k: node.present(k) for k in keys if k in node.committed}
        for key in new:
            node.writing[key] = 0
        try:
            slots = dict(zip(new, await self._slots(len(new), timeout), strict=True))
        except BaseException:
            for key in new:
                del node.writing[key]
            for held in found.values():
                if held:
                    node.let_go(held)
            raise
        return [found.get(key) or self._reserved(key, slots.get(key)) for key in keys]

    def _reserved(self, key: bytes, slot: int | None) -> Held:
        held = self.node.hold(-1 if slot is None else slot, Kind.IN_PROGRESS if slot is None else Kind.NEW, key)
        if slot is not None:
            self.node.writing[key] = held.hold
        return held

    async def allocate(self, count: int, owner: Owner, pool_class: PoolClass, timeout: float) -> list[Held]:
        return [self.node.hold(slot, Kind.NEW) for slot in await self._slots(count, timeout)]

    async def wait(self, key: bytes, owner: Owner, timeout: float) -> Held | None:
        await self._until(lambda: key not in self._alive().writing, timeout)
        return self.node.present(key)

    async def commit(
        self, holds: Sequence[Held], parent: bytes, keys: Sequence[bytes], indexed: bool = False
    ) -> list[Held]:
        return [self._alive().commit(held, key) for held, key in zip(holds, keys, strict=True)]

    async def release(self, holds: Sequence[Held]) -> None:
        for held in holds:
            self._alive().let_go(held)

    async def fetch(
        self,
        keys: Sequence[bytes],
        parent: bytes,
        sources: Sequence[str],
        owner: Owner,
        pool_class: PoolClass,
        timeout: float,
    ) -> list[Fetched]:
        return [await self._fetch(key, sources, owner, timeout) for key in keys]

    async def _fetch(self, key: bytes, sources: Sequence[str], owner: Owner, timeout: float) -> Fetched:
        held = await self.wait(key, owner, timeout) if key in self._alive().writing else self.node.present(key)
        if held is not None:
            return Fetched(held)
        for source in sources or list(self.node.network.nodes):
            if source != self.agent.id and (fetched := await self._copy(key, source)) is not None:
                return fetched
        return Fetched(None, error="absent")

    async def _copy(self, key: bytes, source: str) -> Fetched | None:
        node = self._alive()
        node.writing[key] = 0
        try:
            peer = await node.network.node(source)
            if key not in peer.committed:
                return None
            slot = (await self._slots(1, 0))[0]
            node.memory[slot] = peer.memory[peer.committed[key]]
        except (PeerGone, PoolFull):
            return None
        finally:
            node.writing.pop(key, None)
        node.network.moved += node.geometry.slot_bytes
        return Fetched(node.commit(node.hold(slot, Kind.NEW, key), key), "memory", node.geometry.slot_bytes)

    async def open_landing(
        self,
        keys: Sequence[bytes],
        blocks: int,
        tokens: int,
        writer: Ref,
        owner: Owner,
        timeout: float,
        apart: frozenset[int] = frozenset(),
    ) -> Landing:
        node = self._alive()
        size = node.geometry.block_size
        held = {i: one for i, key in enumerate(keys) if i not in apart and (one := node.present(key))}
        have = frozenset(held)
        try:
            slots = iter(await self._slots(blocks - len(have), timeout))
        except BaseException:
            for one in held.values():
                node.let_go(one)
            raise
        for block in range(blocks):
            if block not in held:
                held[block] = node.hold(next(slots), Kind.NEW)
        landing = Landing(next(node.numbers), [held[i] for i in range(blocks)], have)
        missing = np.ones((blocks, node.geometry.layers, size), dtype=bool)
        missing[-1, :, tokens - (blocks - 1) * size :] = False
        node.landings[landing.token] = OpenLanding(landing, set(range(blocks)) - have - apart, missing)
        return landing

    async def missing(self, landing: Landing, timeout: float) -> int:
        await self._until(lambda: not self._open(landing).left(), timeout)
        return self._open(landing).left()

    def _open(self, landing: Landing) -> OpenLanding:
        entry = self._alive().landings.get(landing.token)
        if entry is None or entry.fenced:
            raise Fenced("the landing has ended")
        return entry

    async def owe(self, landing: Landing, blocks: Sequence[int]) -> None:
        self._open(landing).owed.update(blocks)

    async def close_landing(self, landing: Landing, keep: bool) -> list[Held]:
        entry = self._alive().landings.pop(landing.token, None)
        if entry is None:
            return []
        entry.fenced = True
        if not keep:
            for held in landing.held:
                self.node.let_go(held)
        return list(landing.held) if keep else []

    async def stream(self, target: LandingTarget, runs: Sequence[Run], owner: Owner, timeout: float) -> int:
        node = self._alive()
        peer = await node.network.node(target.agent.id)
        moved = peer.receive(target.token, runs, node)
        node.network.moved += moved
        return moved
