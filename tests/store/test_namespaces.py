"""Slabs of several namespaces in one pool: each its own geometry, those that nobody uses make way for new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest

from services.store import slabs
from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.memory import stride_of
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from shared.errors import ConfigError, InvalidInput
from shared.records import SlabRecord
from tests.store.conftest import NAMESPACE, STRIDE

Start = Callable[..., Awaitable[Agent]]
WIDE = msgspec.structs.replace(NAMESPACE, model="wide", layers=12)
OTHER = msgspec.structs.replace(NAMESPACE, model="other")


async def attach(agent: Agent, namespace: Namespace, stack: AsyncExitStack) -> StoreClient:
    client = await StoreClient.connect(agent.settings.socket, namespace, secret="s", owner_name="n", timeout=100.0)
    return await stack.enter_async_context(client)


async def unused(agent: Agent) -> None:
    """The agent has seen that nobody is attached."""
    async with asyncio.timeout(100):
        while agent.stats()["store_connections"] or not all(slab.idle for slab in agent.slabs.values()):
            await asyncio.sleep(0.01)


async def test_geometries_of_their_own_in_one_pool(start_agent: Start, stack: AsyncExitStack) -> None:
    agent = await start_agent(slots=14, slab_bytes=8 * STRIDE)
    one, wide = await attach(agent, NAMESPACE, stack), await attach(agent, WIDE, stack)
    assert (one.pool.slots, wide.pool.slots) == (8, 8 * STRIDE // stride_of(WIDE.geometry))
    key = b"k" * 16
    await one.put([(key, b"one")])
    await wide.put([(key, b"wide" * 1000)])
    assert await one.get([key]) == [b"one"] and await wide.get([key]) == [b"wide" * 1000]
    await one.put([(bytes([i]) * 16, b"x") for i in range(40)])
    assert await wide.get([key]) == [b"wide" * 1000]
    with pytest.raises(ConfigError) as refused:
        await attach(agent, OTHER, stack)
    assert "slab_bytes" in refused.value.message and "namespace_idle" in refused.value.message


async def test_a_namespace_that_nobody_uses_makes_way_and_comes_back_empty(
    start_agent: Start, stack: AsyncExitStack, transport: str
) -> None:
    a = await start_agent(slots=8, namespace_idle=0.0, transports=f"require:{transport}")
    b = await start_agent(slots=16, transports=f"require:{transport}")
    keys = [bytes([i]) * 16 for i in range(4)]
    reader = await attach(b, NAMESPACE, stack)
    async with AsyncExitStack() as inner:
        first = await attach(a, NAMESPACE, inner)
        await first.put([(k, k) for k in keys])
        assert await reader.get(keys[:1]) == keys[:1]
        with pytest.raises(ConfigError):
            await attach(a, OTHER, stack)  # it is attached
    await unused(a)
    second = await attach(a, OTHER, stack)
    assert len(a.slabs) == 1 and await second.put([(keys[0], b"second")])
    assert await reader.get(keys) == [keys[0], None, None, None]

    await second.close()
    await unused(a)
    third = await attach(a, NAMESPACE, stack)
    assert await third.contains(keys) == [False] * 4
    await third.put([(k, b"anew" + k) for k in keys])
    assert await reader.get(keys[1:]) == [b"anew" + k for k in keys[1:]]  # the memory is another


@pytest.mark.parametrize("hold", ["pin", "lease", "landing"])
async def test_what_is_held_keeps_its_namespace(start_agent: Start, stack: AsyncExitStack, hold: str) -> None:
    agent = await start_agent(slots=8, namespace_idle=0.0)
    key = b"child-0000000001"
    async with AsyncExitStack() as inner:
        client = await attach(agent, NAMESPACE, inner)
        await client.put([(key, b"x")])
        if hold == "pin":
            await client.pin([key])
        elif hold == "lease":
            slab = next(iter(agent.slabs.values()))
            slab.pool.lease([key], 99, Owner("a stopped engine"))
        else:
            slab = next(iter(agent.slabs.values()))
            slab.pool.allocate(1, 99, Owner("quarantined"), PoolClass.LANDING)
    with pytest.raises(ConfigError):
        await attach(agent, OTHER, stack)
    (slab,) = agent.slabs.values()
    assert slab.contains([key]) == [True]
    assert agent.stats()["slots"] == 8


async def test_one_object_larger_than_a_slab_gets_a_slab_of_its_size(start_agent: Start, stack: AsyncExitStack) -> None:
    agent = await start_agent(slots=14, slab_bytes=STRIDE)
    large = await attach(agent, WIDE, stack)
    assert stride_of(WIDE.geometry) > STRIDE and large.pool.slots == 1
    assert (await attach(agent, NAMESPACE, stack)).pool.slots == 1


async def test_an_agent_has_so_many_namespaces_and_its_record_no_more(
    start_agent: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is left, but its record goes out with every heartbeat."""
    monkeypatch.setattr(slabs, "MOST", 3)
    agent = await start_agent(slots=40, slab_bytes=STRIDE, namespace_idle=0.0)
    names = [msgspec.structs.replace(NAMESPACE, model=f"m{number}") for number in range(6)]
    async with AsyncExitStack() as inner:
        for namespace in names[:3]:
            await attach(agent, namespace, inner)
        await attach(agent, names[1], inner)  # is there already
        with pytest.raises(ConfigError, match=r"has 3 namespaces, 3 at most.*namespace_idle") as refused:
            await attach(agent, names[3], stack)
        assert refused.value.field == "namespace"
    await unused(agent)
    for namespace in names[3:]:  # those that nobody uses make way, the least recently used one first
        await attach(agent, namespace, stack)
        agent.stats()
        assert len(agent.slabs) == len(agent.slabs.records()) == 3
    assert {slab.namespace for slab in agent.slabs.values()} == set(names[3:])


@pytest.mark.parametrize("field", ["model", "weights", "tokenizer", "dtype", "layout"])
async def test_the_texts_of_a_namespace_have_a_limit(start_agent: Start, stack: AsyncExitStack, field: str) -> None:
    agent = await start_agent()
    wrong = msgspec.structs.replace(NAMESPACE, **{field: "\u00e4" * slabs.LONGEST})
    with pytest.raises(
        InvalidInput, match=f"{field} has {2 * slabs.LONGEST} bytes, {slabs.LONGEST} at most"
    ) as refused:
        await attach(agent, wrong, stack)
    assert refused.value.field == field and not agent.slabs


def test_the_part_of_a_record_that_namespaces_take_is_bounded() -> None:
    """What an agent publishes at worst, every second."""
    text = "x" * slabs.LONGEST
    namespace = msgspec.structs.replace(NAMESPACE, model=text, weights=text, tokenizer=text, layout=text)
    large = 1 << 62
    record = SlabRecord(segment=text, namespace=namespace, stride=large, slots=large, used=large, blocks=large)
    assert slabs.MOST * len(msgspec.msgpack.encode(record)) < 2 << 20
