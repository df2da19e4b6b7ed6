"""A prefill instance keeps copies of hot prefixes as told: brought from a node that has them, dropped to a floor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from uuid import uuid4

import numpy as np
import pytest

from services.prefill.replicas import ReplicaKeeper
from services.store.agent import Agent, run_agent
from services.store.client import StoreClient
from services.store.memory import stride_of
from services.store.settings import StoreSettings
from shared.blocks import Namespace, chain_keys, split_keys
from shared.embedded import RedisServer
from shared.engines.base import Owner, PoolClass
from shared.errors import InvalidInput
from shared.messages import Ref, Replicas, ReplicasDone

NAMESPACE = Namespace(
    model="h", weights="h", tokenizer="h", dtype="float32", layers=2, kv_heads=1, head_dim=32, block_size=16
)
CONDUCTOR = Ref("conductor", 1)


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


class Node:
    def __init__(self, agent: Agent, client: StoreClient) -> None:
        self.id = client.agent.id
        self.agent = agent
        self.client = client
        self.ref = Ref(f"prefill-{self.id}", 1)
        self.keeper = ReplicaKeeper(self.ref, lambda: client, timeout=50.0)

    async def told(self, **order: object) -> ReplicasDone:
        message = Replicas(sender=CONDUCTOR, target=self.ref, **order)  # type: ignore[arg-type]
        return await self.keeper.carry_out(message)

    async def has(self, keys: bytes) -> list[bool]:
        return await self.client.contains(split_keys(keys))


async def start(redis: str, mesh: str, stack: AsyncExitStack) -> Node:
    settings = StoreSettings(
        redis=redis,
        mesh=mesh,
        node="n-" + uuid4().hex[:6],
        socket="@hot-" + uuid4().hex,
        pool_bytes=16 * stride_of(NAMESPACE.geometry),
        secret="s",
        growth_headroom=0.0,
    )
    agent = await stack.enter_async_context(run_agent(settings))
    client = await StoreClient.connect(settings.socket, NAMESPACE, secret="s", owner_name="test")
    return Node(agent, await stack.enter_async_context(client))


@pytest.fixture
async def nodes(redis: str) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        mesh = "m" + uuid4().hex[:8]
        yield [await start(redis, mesh, stack) for _ in range(2)]


async def compute(node: Node, keys: bytes) -> None:
    """Commit a chain of blocks there, in the index too."""
    owner = Owner("prompt")
    held = await node.client.reserve(split_keys(keys), owner, PoolClass.PREFILL, 50.0)
    await node.client.commit(held, NAMESPACE.root(), split_keys(keys), indexed=True)
    await node.client.release(held)


async def test_copies_are_brought_and_dropped_but_never_the_last_ones(nodes: list[Node]) -> None:
    here, there = nodes
    keys = chain_keys(NAMESPACE.root(), np.arange(4 * 16, dtype=np.uint32), 16)
    await compute(here, keys)
    async with asyncio.timeout(200):
        while (done := await there.told(bring=keys[:32], sources=[here.id])).there < 2:
            await asyncio.sleep(0.1)  # it has not seen the other agent yet
    assert done.fetched in (0, 2) and done.sender == there.ref and done.target == CONDUCTOR
    more = await there.told(before=keys[16:32], bring=keys[32:], sources=[here.id])
    assert (more.there, more.fetched, more.dropped) == (2, 2, 0)
    assert await there.has(keys) == [True] * 4 and await here.has(keys) == [True] * 4
    assert (await here.told(bring=keys, sources=[there.id])).fetched == 0  # there already
    assert (await there.told(drop=keys, keep=2)).dropped == 0  # there are only two
    async with asyncio.timeout(200):
        while (await there.told(drop=keys[32:], keep=1)).dropped == 0:
            await asyncio.sleep(0.1)  # the index follows
    assert await there.has(keys) == [True, True, False, False]
    assert (await here.told(drop=keys[32:], keep=1)).dropped == 0  # the last ones
    assert await here.has(keys) == [True] * 4
    stats = await there.client.stats()
    assert not stats.get("store_holds") and not stats.get("store_fetches")


async def test_what_nobody_has_is_not_brought_and_no_floor_is_refused(nodes: list[Node]) -> None:
    here, there = nodes
    keys = chain_keys(NAMESPACE.root(), np.arange(5, 5 + 32, dtype=np.uint32), 16)
    done = await here.told(bring=keys, sources=[there.id])
    assert (done.there, done.fetched) == (0, 0)
    with pytest.raises(InvalidInput, match="copies to be left"):
        await here.client.let_go(split_keys(keys), 0)
