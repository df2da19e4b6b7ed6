"""Redis flushed, restarted empty, failed over to a stale copy, under load: index and inventory agree again by
themselves, and no reader ever gets wrong bytes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest

from services.store.agent import Agent, run_agent
from services.store.client import StoreClient
from services.store.memory import stride_of
from services.store.settings import StoreSettings
from shared.blocks import Namespace
from shared.embedded import RedisServer
from shared.errors import MooncakeError
from shared.index import code
from shared.index.lookup import lookup
from shared.index.mirroring import IndexMirror
from shared.metadata import Metadata
from shared.redis_client import RedisLink
from shared.tasks import end

NAMESPACE = Namespace(
    model="r", weights="r", tokenizer="r", dtype="float32", layers=4, kv_heads=2, head_dim=16, block_size=16
)
SLOTS = 48
Harm = Callable[[RedisServer, RedisLink], Awaitable[None]]


def value(key: bytes) -> bytes:
    return hashlib.sha256(key).digest() * 8


class Mesh:
    """Three agents with a client each, on one real Redis; ``keys``: all that was ever put."""

    def __init__(self, name: str, link: RedisLink, agents: list[Agent], clients: list[StoreClient]) -> None:
        self.name = name
        self.link = link
        self.agents = agents
        self.clients = clients
        self.keys: list[bytes] = []
        self.wrong = 0
        self.read = 0

    async def write(self, client: StoreClient) -> None:
        """More than the pool holds: blocks come and go all the time."""
        chance = random.Random(client.agent.id)
        while True:
            new = [chance.randbytes(16) for _ in range(4)]
            self.keys += new
            with contextlib.suppress(MooncakeError):  # a slow machine: what counts is that nothing wrong is read
                await client.put([(key, value(key)) for key in new])
                await self.check(client, chance.sample(self.keys, min(4, len(self.keys))))
            await asyncio.sleep(0.01)

    async def check(self, client: StoreClient, keys: list[bytes]) -> None:
        for key, got in zip(keys, await client.get(keys, 2.0), strict=True):
            self.read += got is not None
            self.wrong += got is not None and got != value(key)

    async def found(self) -> bool:
        """Something of the latest is read, by those that do not hold it too."""
        before = self.read
        for client in self.clients:
            await self.check(client, self.keys[-SLOTS:])
        return self.read > before

    async def agrees(self) -> bool:
        """The index names each agent for exactly the blocks that it says it has."""
        places = await lookup(self.link, self.name, self.keys)
        for client in self.clients:
            there = await client.contains(self.keys)
            if [code(client.agent.incarnation) in place for place in places] != there:
                return False
        return True


async def flushed(_: RedisServer, link: RedisLink) -> None:
    await link.client.flushall()


async def restarted(server: RedisServer, _: RedisLink) -> None:
    server.kill()
    await asyncio.sleep(1.0)  # long enough to be noticed
    server.start()


async def failed_over(_: RedisServer, link: RedisLink) -> None:
    """To a copy taken earlier: everything is there, as it was then."""
    copy = {key: await link.client.dump(key) for key in await link.client.keys("mc:*")}
    await asyncio.sleep(1.5)  # writers go on; what they say now is lost
    async with link.client.pipeline(transaction=True) as change:
        change.flushall()
        for key, packed in copy.items():
            if packed is not None:
                change.restore(key, 0, packed)
        await change.execute()


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def build(server: RedisServer, stack: AsyncExitStack) -> Mesh:
    name = "m" + uuid4().hex[:8]
    agents, clients = [], []
    for _ in range(3):
        settings = StoreSettings(
            redis=server.url,
            mesh=name,
            socket="@loss-" + uuid4().hex,
            pool_bytes=SLOTS * stride_of(NAMESPACE.geometry),
            growth_headroom=0.0,
            secret="s",
            transports="require:tcp",
        )
        agents.append(await stack.enter_async_context(run_agent(settings)))
        client = StoreClient.connect(settings.socket, NAMESPACE, secret="s")
        clients.append(await stack.enter_async_context(await client))
    link = RedisLink(server.url)
    stack.push_async_callback(link.close)
    return Mesh(name, link, agents, clients)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("harm", [flushed, restarted, failed_over])
async def test_b3_index_and_inventory_agree_again(server: RedisServer, harm: Harm) -> None:
    async with AsyncExitStack() as stack:
        mesh = await build(server, stack)
        mirror = await stack.enter_async_context(IndexMirror(server.url, mesh.name))
        mirror.living({code(agent.ref.incarnation) for agent in mesh.agents})
        load = [asyncio.create_task(mesh.write(client)) for client in mesh.clients]
        async with asyncio.timeout(280):
            while len(mesh.keys) < 3 * SLOTS:
                await asyncio.sleep(0.02)
            await harm(server, mesh.link)
            reached = len(mesh.keys)
            while len(mesh.keys) < reached + SLOTS:  # they go on putting meanwhile
                await asyncio.sleep(0.02)
            await end(*load)
            assert not any(task.done() and not task.cancelled() and task.exception() for task in load)
            await eventually(mesh.agrees)
            held = {
                code(client.agent.incarnation).hex(): sum(await client.contains(mesh.keys)) for client in mesh.clients
            }
            await eventually(lambda: follows(mirror, held))
            async with await Metadata.connect(server.url, mesh.name) as metadata:
                await eventually(lambda: registered(metadata, mesh))
            await eventually(mesh.found)
        assert mesh.wrong == 0


async def follows(mirror: IndexMirror, held: dict[str, int]) -> bool:
    return mirror.synced and mirror.summary()["blocks"] == held


async def registered(metadata: Metadata, mesh: Mesh) -> bool:
    return {record.ref for record in await metadata.agents()} == {agent.ref for agent in mesh.agents}


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Within the test's own deadline."""
    while True:
        with contextlib.suppress(MooncakeError):
            if await holds():
                return
        await asyncio.sleep(0.05)
