"""The whole way of a block: written here, leased, fetched there; and streamed into a landing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from services.store.client import StoreClient
from shared.engines.base import Kind, KVStore, LandingTarget, Owner, PoolClass, Run
from shared.errors import Fenced, MooncakeError
from shared.messages import Ref

OWNER = Owner("request/1")


async def write_chain(
    client: StoreClient, pool: Any, keys: list[bytes], parent: bytes = b"", seed: int = 0
) -> list[bytes]:
    """Random committed blocks under ``keys``; returns their bytes."""
    size = client.pool.geometry.slot_bytes
    held = await client.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)
    assert [h.kind for h in held] == [Kind.NEW] * len(keys)
    data = [np.random.default_rng(seed + i).bytes(size) for i in range(len(keys))]
    for h, content in zip(held, data, strict=True):
        pool[h.slot, :size] = np.frombuffer(content, np.uint8)
    held = await client.commit(held, parent, keys)
    assert [h.kind for h in held] == [Kind.PRESENT] * len(keys)
    await client.release(held)
    return data


async def test_blocks_written_at_one_agent_are_fetched_at_another(
    start_agent: Any, connect: Any, view: Any, key: Callable[[object], bytes], transport: str
) -> None:
    a = await start_agent(transports=f"require:{transport}", verify="always")
    b = await start_agent(transports=f"require:{transport}", verify="always")
    writer, reader = await connect(a), await connect(b)
    keys = [key(i) for i in range(5)]
    data = await write_chain(writer, view(writer), keys)

    fetched = await reader.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 100.0)

    assert [f.error for f in fetched] == [""] * 5
    assert {f.transport for f in fetched} == {transport}
    size = reader.pool.geometry.slot_bytes
    assert [f.bytes for f in fetched] == [size] * 5
    pool = view(reader)
    assert [pool[f.held.slot, :size].tobytes() for f in fetched] == data
    assert await reader.contains(keys) == [True] * 5
    again = await reader.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 100.0)
    assert [(f.transport, f.bytes) for f in again] == [("", 0)] * 5


async def test_a_prompt_is_streamed_into_a_landing(
    start_agent: Any, connect: Any, view: Any, key: Callable[[object], bytes], transport: str
) -> None:
    a = await start_agent(transports=f"require:{transport}")
    b = await start_agent(transports=f"require:{transport}")
    prefill, decode = await connect(a), await connect(b)
    g, tokens = prefill.pool.geometry, 40  # two full blocks of 16 and one of 8
    landing = await decode.open_landing([key(0), key(1)], 3, tokens, prefill.agent, OWNER, 100.0)
    assert landing.have == frozenset()
    target = LandingTarget(decode.agent, landing.token, [h.slot for h in landing.held])
    source = await prefill.allocate(3, OWNER, PoolClass.PREFILL, 100.0)
    pool = view(prefill)
    for h in source:
        pool[h.slot] = np.random.default_rng(h.slot).integers(0, 256, pool.shape[1], np.uint8)

    moved = 0
    for first, last in ((0, 1), (1, 4)):
        runs = [Run(source[i].slot, i, first, last, 0, 16 if i < 2 else 8) for i in range(3)]
        assert await decode.missing(landing, 0.01)
        moved += await prefill.stream(target, runs, OWNER, 100.0)
    assert not await decode.missing(landing, 100.0)
    assert moved == tokens * g.token_bytes * g.layers

    held = await decode.close_landing(landing, keep=True)
    there = view(decode)
    for i in range(3):
        mine = pool[source[i].slot, : g.slot_bytes].reshape(g.layers, g.block_size, -1)
        theirs = there[held[i].slot, : g.slot_bytes].reshape(g.layers, g.block_size, -1)
        owed = 16 if i < 2 else 8
        assert np.array_equal(mine[:, :owed], theirs[:, :owed])
    committed = await decode.commit(held[:2], b"", [key(0), key(1)])
    assert [h.kind for h in committed] == [Kind.PRESENT] * 2


async def test_ipv6_and_the_same_node(
    start_agent: Any, connect: Any, view: Any, key: Callable[[object], bytes]
) -> None:
    """Prefill and decode on one node: the stream is a copy inside the slab, through the same checks."""
    a, b = await start_agent(host="::1", transports="require:tcp"), await start_agent(host="::1")
    here, there = await connect(a), await connect(b)
    keys = [key(i) for i in range(2)]
    data = await write_chain(here, view(here), keys)
    assert [f.error for f in await there.fetch(keys, b"", [a.ref.id], OWNER, PoolClass.PREFILL, 100.0)] == ["", ""]

    source = [h for h in await here.lease(keys, OWNER) if h is not None]
    landing = await here.open_landing([], 2, 32, here.agent, OWNER, 100.0)
    target = LandingTarget(here.agent, landing.token, [h.slot for h in landing.held])
    size = here.pool.geometry.slot_bytes
    assert (
        await here.stream(target, [Run(h.slot, i, 0, 4, 0, 16) for i, h in enumerate(source)], OWNER, 100.0) == 2 * size
    )
    assert not await here.missing(landing, 100.0)
    held = await here.close_landing(landing, keep=True)
    assert [view(here)[h.slot, :size].tobytes() for h in held] == data
    with pytest.raises(Fenced):
        await here.stream(target, [Run(source[0].slot, 0, 0, 1, 0, 16)], OWNER, 100.0)


async def test_a_writer_may_not_exceed_its_landing(
    start_agent: Any, connect: Any, key: Callable[[object], bytes], transport: str
) -> None:
    a = await start_agent(transports=f"require:{transport}")
    b = await start_agent(transports=f"require:{transport}")
    prefill, decode = await connect(a), await connect(b)
    (source,) = await prefill.allocate(1, OWNER, PoolClass.PREFILL, 100.0)
    (victim,) = await decode.allocate(1, OWNER, PoolClass.GROWTH, 100.0)
    landing = await decode.open_landing([], 2, 32, prefill.agent, OWNER, 1.0, apart=frozenset({1}))
    slots = [h.slot for h in landing.held]
    run = [Run(source.slot, 0, 0, 4, 0, 16)]
    other = await connect(b)
    for bad in (
        LandingTarget(decode.agent, landing.token, [victim.slot]),
        LandingTarget(decode.agent, landing.token, [slots[1]]),  # not owed
        LandingTarget(decode.agent, landing.token + 1, slots),
        LandingTarget(decode.agent, landing.token, [1 << 40]),
        LandingTarget(decode.agent, landing.token, [-1]),
        LandingTarget(Ref(decode.agent.id, 1), landing.token, slots),
    ):
        with pytest.raises(MooncakeError):
            await prefill.stream(bad, run, OWNER, 100.0)
    with pytest.raises(Fenced):  # another connection's
        await other.missing(landing, 0.1)
    await decode.owe(landing, [1])
    whole = LandingTarget(decode.agent, landing.token, slots)
    await prefill.stream(whole, [*run, Run(source.slot, 1, 0, 4, 0, 16)], OWNER, 100.0)
    assert not await decode.missing(landing, 100.0)
    assert a.stats()["store_streams"] == 0


def test_the_client_is_a_kv_store() -> None:
    """Checked by mypy: exactly the Protocol that engines' services are written against."""
    kind: type[KVStore] = StoreClient
    assert kind is StoreClient
