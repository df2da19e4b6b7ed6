"""The blocks of one prompt at this node: which are cached, which we write, which somebody else is writing."""

from __future__ import annotations

from collections.abc import Sequence

from services.prefill.plan import Block
from shared.engines.base import Held, Kind, KVStore, Owner, PoolClass
from shared.errors import StaleToken
from shared.instance.holds import Holds
from shared.instance.job import Prompt

WAIT_S = 10.0
"""How long another writer of a block is waited for before it is computed privately."""


class PromptBlocks:
    """``state[i]`` and ``slots[i]`` of block i (-1 while nobody here holds it). All holds belong to ``holds``."""

    def __init__(self, prompt: Prompt, store: KVStore, holds: Holds, owner: Owner, timeout: float) -> None:
        self.prompt, self.timeout = prompt, timeout
        self._store, self._holds, self._owner = store, holds, owner
        self.state = [Block.OURS] * prompt.blocks
        self.slots = [-1] * prompt.blocks
        self._held: list[Held | None] = [None] * prompt.blocks
        self.local_blocks = self.fetched_blocks = 0
        self._fetched: set[int] = set()
        self._ready: list[int] | None = None
        self._spare: int | None = None

    @property
    def lead(self) -> int:
        """Blocks ready from the start without a hole."""
        return next((i for i, state in enumerate(self.state) if state is not Block.READY), len(self.state))

    @property
    def ready(self) -> list[int]:
        """Asked for after every chunk, however long the prompt: found anew only when it has changed."""
        if self._ready is None:
            self._ready = [i for i, state in enumerate(self.state) if state is Block.READY]
        return list(self._ready)

    async def find(self) -> None:
        """While queued: touch and softly hold what the local pool has."""
        await self._lease(PoolClass.PREFETCH)

    async def harden(self) -> None:
        """Computing is near: hold for good what is still here, and let go of the soft holds."""
        soft = [held for held in self._held if held is not None]
        self.state, self._ready = [Block.OURS] * self.prompt.blocks, None
        self.slots = [-1] * self.prompt.blocks
        self._held = [None] * self.prompt.blocks
        await self._lease(PoolClass.PREFILL)
        await self._holds.release(soft)
        self.fetched_blocks = len(self._fetched.intersection(self.ready))
        self.local_blocks = len(self.ready) - self.fetched_blocks

    async def _lease(self, pool_class: PoolClass) -> None:
        if keys := self.prompt.keys:
            for block, held in enumerate(await self._holds.take(self._store.lease(keys, self._owner, pool_class))):
                self._set_ready(block, held)

    async def fetch(self, blocks: int, sources: Sequence[str], timeout: float) -> None:
        """Have the first ``blocks`` blocks brought here; what cannot be had is computed later."""
        lead, want = self.lead, min(blocks, self.prompt.full)
        if want <= lead:
            return
        keys, parent = self.prompt.keys[lead:want], self.prompt.parent(lead)
        call = self._store.fetch(keys, parent, sources, self._owner, PoolClass.PREFETCH, timeout)
        for block, fetched in enumerate(await self._holds.take(call), start=lead):
            self._set_ready(block, fetched.held)
            if fetched.bytes > 0:
                self._fetched.add(block)

    async def reserve(self) -> list[int]:
        """Slots for all that is not ready. Returns blocks that turned out to be ready. Raises PoolFull, DoesNotFit."""
        missing = [i for i in range(self.prompt.full) if self.state[i] is not Block.READY and self.slots[i] < 0]
        found = await self._reserve(missing)
        if self.prompt.blocks > self.prompt.full and self.slots[-1] < 0:
            await self._private(self.prompt.full)
        return found

    async def _reserve(self, blocks: Sequence[int]) -> list[int]:
        if not blocks:
            return []
        keys = [self.prompt.keys[i] for i in blocks]
        call = self._store.reserve(keys, self._owner, PoolClass.PREFILL, self.timeout)
        for block, held in zip(blocks, await self._holds.take(call), strict=True):
            if held.kind is Kind.PRESENT:
                self._set_ready(block, held)
                self.local_blocks += 1
            else:
                self._held[block], self.slots[block] = held, held.slot
                self.state[block] = Block.OURS if held.kind is Kind.NEW else Block.AWAITED
        return [i for i in blocks if self.state[i] is Block.READY]

    async def resolve(self, block: int) -> bool:
        """Wait for the other writer of a block; True when it is ready then, False when it is ours to compute."""
        held = await self._holds.take(self._store.wait(self.prompt.keys[block], self._owner, WAIT_S))
        if held is not None:
            self._set_ready(block, held)
            self.local_blocks += 1
            return True
        if await self._reserve([block]):
            return True
        if self.state[block] is Block.AWAITED:
            await self._private(block)
        return False

    async def _private(self, block: int) -> None:
        call = self._store.allocate(1, self._owner, PoolClass.PREFILL, self.timeout)
        (held,) = await self._holds.take(call)
        self._held[block], self.slots[block], self.state[block] = held, held.slot, Block.OURS

    async def spare(self) -> int:
        """A private slot for recomputing the last token of a prompt that is ready altogether."""
        if self._spare is None:
            call = self._store.allocate(1, self._owner, PoolClass.PREFILL, self.timeout)
            self._spare = (await self._holds.take(call))[0].slot
        return self._spare

    async def commit(self, blocks: Sequence[int]) -> None:
        """Make computed full blocks visible. Consecutive numbers. One that is committed already stays private."""
        ours = [(i, held) for i in blocks if self.state[i] is Block.OURS and (held := self._held[i])]
        if ours:
            keys = [self.prompt.keys[i] for i, _ in ours]
            await self._store.commit([held for _, held in ours], self.prompt.parent(ours[0][0]), keys)

    def _set_ready(self, block: int, held: Held | None) -> None:
        if held is None or self.state[block] is Block.READY:
            return
        if held.slot < 0:
            raise StaleToken(f"block {block} is said to be present without a slot")
        self._held[block], self.slots[block], self.state[block] = held, held.slot, Block.READY
        self._ready = None
