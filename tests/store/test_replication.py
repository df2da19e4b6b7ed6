"""ACCEPTANCE C5: copies at distinct agents, more and fewer, one agent dead, more wanted than there are agents."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.agent import Agent, run_agent
from services.store.client import StoreClient
from services.store.memory import stride_of
from services.store.object_calls import Replicas
from services.store.placement import Place, order_for_more, order_to_drop
from services.store.settings import StoreSettings
from shared.blocks import Namespace
from shared.embedded import RedisServer
from shared.engines.base import Owner, PoolClass
from shared.errors import InvalidInput

NAMESPACE = Namespace(
    model="r", weights="r", tokenizer="r", dtype="float32", layers=2, kv_heads=1, head_dim=32, block_size=16
)
Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]

places = st.lists(
    st.builds(
        Place,
        st.integers(0, 99).map(str),
        st.sampled_from("nm"),
        st.sampled_from(["", "h", "i"]),
        st.sampled_from([0.0, 0.5]),
    ),
    unique_by=lambda place: place.id,
    max_size=6,
)


@given(places, st.data())
def test_copies_go_where_fewest_are_and_leave_where_most_are(some: list[Place], data: st.DataObject) -> None:
    holders = data.draw(st.sets(st.sampled_from([p.id for p in some]))) if some else set()
    more, fewer = order_for_more(some, holders), order_to_drop(some, holders)
    assert sorted(more) == sorted({p.id for p in some} - holders)
    assert sorted(fewer) == sorted(holders)
    node = {p.id: p.node for p in some}
    counts = Counter(node[id] for id in holders)
    for id in more:
        assert counts[node[id]] == min(counts[p.node] for p in some if p.id in more[more.index(id) :])
        counts[node[id]] += 1
    counts = Counter(node[id] for id in holders)
    for id in fewer:
        assert counts[node[id]] == max(counts.values())
        counts[node[id]] -= 1


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


class Mesh:
    """Agents of one mesh on a real Redis, in this process and in others."""

    def __init__(self, redis: str, stack: AsyncExitStack) -> None:
        self._redis = redis
        self._name = "m" + uuid4().hex[:8]
        self._stack = stack

    async def start(self, node: str, slots: int = 16) -> Agent:
        settings = StoreSettings(
            redis=self._redis,
            mesh=self._name,
            node=node,
            socket="@replica-" + uuid4().hex,
            pool_bytes=slots * stride_of(NAMESPACE.geometry),
            secret="s",
            growth_headroom=0.0,
        )
        return await self._stack.enter_async_context(run_agent(settings))

    async def spawn(self, node: str, id: str) -> Process:
        flags = ["--redis", self._redis, "--mesh", self._name, "--node", node, "--id", id, "--pool-bytes", "1MiB"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.store",
            *flags,
            "--socket",
            "@replica-" + uuid4().hex,
            env=os.environ | {"MOONCAKE_SECRET": "s"},
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._stack.push_async_callback(process.wait)
        self._stack.callback(lambda: process.kill() if process.returncode is None else None)
        return process


@pytest.fixture
async def mesh(redis: str) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        yield Mesh(redis, stack)


async def client_of(agent: Agent, stack: AsyncExitStack) -> StoreClient:
    client = await StoreClient.connect(agent.settings.socket, NAMESPACE, secret="s", owner_name="test")
    return await stack.enter_async_context(client)


async def copies_of(client: StoreClient, keys: list[bytes], copies: int) -> list[Replicas]:
    """Asked for until it is so: on a busy machine an agent may not answer in time."""
    async with asyncio.timeout(200):
        while True:
            found = await client.change_replica(keys, copies, timeout=50.0)
            if all(len(r.agents) == copies for r in found):
                return found


async def known(client: StoreClient, agents: int, key: bytes) -> None:
    """The client's agent has seen all agents of the mesh."""
    async with asyncio.timeout(200):
        while True:
            (found,) = await client.change_replica([key], 64, timeout=50.0)
            if f"{agents} agents are there" in str(found.error) or len(found.agents) == agents:
                return
            await asyncio.sleep(0.05)


async def nothing_held(*agents: Agent) -> None:
    async with asyncio.timeout(100):
        while any(agent.stats()["store_holds"] or agent.stats()["store_leases"] for agent in agents):
            await asyncio.sleep(0.02)


@pytest.mark.timeout(900)
async def test_c5_copies_up_and_down_on_distinct_nodes_and_one_agent_dead(mesh: Mesh, key: Key) -> None:
    async with AsyncExitStack() as stack:
        a, near, c = await mesh.start("a"), await mesh.start("a"), await mesh.start("c")
        far = await mesh.spawn("b", "far")
        client = await client_of(a, stack)
        keys = [key(i) for i in range(3)]
        data = {k: bytes([i]) * 1000 for i, k in enumerate(keys)}
        await client.put(list(data.items()))
        await client.put([(key("probe"), b"x")])
        await known(client, 4, key("probe"))

        await copies_of(client, keys, 3)
        up = await client.change_replica([*keys, key("absent"), keys[0]], 3)
        assert [set(r.agents) for r in up] == [{a.ref.id, "far", c.ref.id}] * 3 + [set(), {*up[0].agents}]
        assert [(r.short, r.error) for r in up] == [(False, None)] * 3 + [(True, None), (False, None)]
        assert all(next(iter(c.slabs.values())).contains(keys))
        assert not near.slabs or not any(next(iter(near.slabs.values())).contains(keys))

        await copies_of(client, keys[:1], 4)
        short = await client.change_replica(keys[:1], 9)
        assert len(short[0].agents) == 4 and short[0].short
        assert short[0].error is not None and "4 agents are there" in short[0].error.message

        down = await copies_of(client, keys, 2)
        nodes = {a.ref.id: "a", near.ref.id: "a", "far": "b", c.ref.id: "c"}
        assert all(len({nodes[id] for id in r.agents}) == 2 for r in down), "both copies on one node"

        await copies_of(client, keys, 3)
        far.kill()  # its record and its entries in the index are still there
        reader = await client_of(near, stack)
        async with asyncio.timeout(200):
            while (await reader.get(keys, timeout=50.0)) != list(data.values()):
                await asyncio.sleep(0.05)
        await nothing_held(a, near, c)


@pytest.mark.timeout(900)
async def test_the_last_copy_is_never_dropped_by_two_at_once(mesh: Mesh, key: Key) -> None:
    async with AsyncExitStack() as stack:
        agents = [await mesh.start(node) for node in "abc"]
        clients = [await client_of(agent, stack) for agent in agents]
        keys = [key(i) for i in range(8)]
        await clients[0].put([(k, k) for k in keys])
        for client in clients:
            await client.put([(key("probe"), b"x")])
            await known(client, 3, key("probe"))
        await copies_of(clients[0], keys, 3)
        await asyncio.gather(*(client.change_replica(keys, 1) for client in clients))
        here = [await client.contains(keys) for client in clients]
        assert all(sum(some) >= 1 for some in zip(*here, strict=True))
        assert sum(map(sum, here)) < 24


async def test_a_pinned_copy_stays_and_a_full_agent_says_why(start_agent: Start, connect: Connect, key: Key) -> None:
    a, b = await start_agent(slots=8), await start_agent(slots=8)
    here, there = await connect(a), await connect(b)
    await here.put([(key(0), b"x"), (key(1), b"y")])
    assert [len(r.agents) for r in await here.change_replica([key(0), key(1)], 2)] == [2, 2]
    assert [p.pinned for p in await there.pin([key(0)])] == [True]
    await here.pin([key(0)])
    assert [len(r.agents) for r in await here.change_replica([key(0), key(1)], 1)] == [2, 1]

    full = await connect(b)
    await full.allocate(7, Owner("busy"), PoolClass.GROWTH, 100.0)
    await here.put([(key(2), b"z")])
    (refused,) = await here.change_replica([key(2)], 2, timeout=0.5)
    assert refused.agents == (a.ref.id,) and refused.short and refused.error is not None
    assert b.ref.id in refused.error.message
    for copies in (0, -1, 65):
        with pytest.raises(InvalidInput) as wrong:
            await here.change_replica([key(0)], copies)
        assert wrong.value.field == "copies"
