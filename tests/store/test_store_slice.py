"""The whole way of a block: written here, leased, fetched there; and streamed into a landing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from services.store.client import StoreClient
from shared.engines.base import Kind, LandingTarget, Owner, PoolClass, Run

OWNER = Owner("request/1")


async def write_chain(
    client: StoreClient, pool: Any, keys: list[bytes], parent: bytes = b"", seed: int = 0
) -> list[bytes]:
    """Random committed blocks under ``keys``; returns their bytes."""
    size = client.pool.geometry.slot_bytes
    held = await client.reserve(keys, OWNER, PoolClass.PREFILL, 1.0)
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

    fetched = await reader.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 5.0)

    assert [f.error for f in fetched] == [""] * 5
    assert {f.transport for f in fetched} == {transport}
    size = reader.pool.geometry.slot_bytes
    assert [f.bytes for f in fetched] == [size] * 5
    pool = view(reader)
    assert [pool[f.held.slot, :size].tobytes() for f in fetched] == data
    assert await reader.contains(keys) == [True] * 5
    again = await reader.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 5.0)
    assert [(f.transport, f.bytes) for f in again] == [("", 0)] * 5


async def test_a_prompt_is_streamed_into_a_landing(
    start_agent: Any, connect: Any, view: Any, key: Callable[[object], bytes], transport: str
) -> None:
    a = await start_agent(transports=f"require:{transport}")
    b = await start_agent(transports=f"require:{transport}")
    prefill, decode = await connect(a), await connect(b)
    g, tokens = prefill.pool.geometry, 40  # two full blocks of 16 and one of 8
    landing = await decode.open_landing([key(0), key(1)], 3, tokens, prefill.agent, OWNER, 1.0)
    assert landing.have == frozenset()
    target = LandingTarget(decode.agent, landing.token, [h.slot for h in landing.held])
    source = await prefill.allocate(3, OWNER, PoolClass.PREFILL, 1.0)
    pool = view(prefill)
    for h in source:
        pool[h.slot] = np.random.default_rng(h.slot).integers(0, 256, pool.shape[1], np.uint8)

    moved = 0
    for first, last in ((0, 1), (1, 4)):
        runs = [Run(source[i].slot, i, first, last, 0, 16 if i < 2 else 8) for i in range(3)]
        assert not await decode.landed(landing, 0.01)
        moved += await prefill.stream(target, runs, OWNER, 5.0)
    assert await decode.landed(landing, 1.0)
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
