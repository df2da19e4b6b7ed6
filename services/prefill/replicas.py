"""Copies of hot prefixes at this node, as a conductor asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.blocks import split_keys
from shared.engines.base import KVStore, LettingGo, Owner, PoolClass
from shared.errors import MooncakeError
from shared.messages import Ref, Replicas, ReplicasDone
from shared.telemetry import counter, log

OWNER = Owner("hot")

logger = log("prefill")


class ReplicaKeeper:
    """``store``: the connection of the moment. One order at a time: prompts' own fetches go beside it."""

    def __init__(self, me: Ref, store: Callable[[], KVStore], timeout: float) -> None:
        self._me = me
        self._store = store
        self._timeout = timeout
        self._turn = asyncio.Lock()
        self._blocks = counter("prefill_replica_blocks", "Copies of hot blocks, by what became of them.", ("outcome",))

    async def carry_out(self, order: Replicas) -> ReplicasDone:
        """What cannot be done now is left: who asked looks again within a second."""
        async with self._turn:
            there, fetched = await self._bring(order) if order.bring else (0, 0)
            dropped = await self._drop(order) if order.drop else 0
        self._blocks.labels("fetched").inc(fetched)
        self._blocks.labels("dropped").inc(dropped)
        return ReplicasDone(sender=self._me, target=order.sender, there=there, fetched=fetched, dropped=dropped)

    async def _bring(self, order: Replicas) -> tuple[int, int]:
        store, keys = self._store(), split_keys(order.bring)
        try:
            found = await store.fetch(keys, order.before, order.sources, OWNER, PoolClass.CACHE, self._timeout)
            await store.release([one.held for one in found if one.held is not None])
        except MooncakeError as e:
            logger.info("hot blocks were not brought", blocks=len(keys), error=e.message)
            return 0, 0
        return sum(one.held is not None for one in found), sum(one.bytes > 0 for one in found)

    async def _drop(self, order: Replicas) -> int:
        store, keys = self._store(), split_keys(order.drop)
        if not isinstance(store, LettingGo):
            return 0
        try:
            return sum(await store.let_go(keys, order.keep))
        except MooncakeError as e:
            logger.info("surplus copies were not dropped", blocks=len(keys), error=e.message)
            return 0
