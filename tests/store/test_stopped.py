"""ACCEPTANCE B1c: engines and agents that are stopped (SIGSTOP) in the middle and go on when others' time is over."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from services.store.agent import Agent, run_agent
from services.store.client import StoreClient
from services.store.memory import stride_of
from services.store.settings import StoreSettings
from shared.blocks import Namespace
from shared.embedded import RedisServer

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]
NAMESPACE = Namespace(
    model="s", weights="s", tokenizer="s", dtype="float32", layers=8, kv_heads=4, head_dim=32, block_size=16
)
BIG = NAMESPACE.geometry.slot_bytes


def content(key: bytes, size: int) -> bytes:
    """The only right bytes for a key."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(size)


async def test_b1c_a_stopped_engine_writes_into_nobody_elses_slot(
    start_agent: Start, connect: Connect, spawn_engine: Any, key: Key, transport: str
) -> None:
    """It is stopped while it writes. Meanwhile the pool turns over many times, leases expire, and others read; then it
    goes on writing, and commits."""
    options = {"transports": f"require:{transport}", "verify": "off", "lease_ttl": 0.1}
    a, b = await start_agent(slots=12, **options), await start_agent(slots=12, **options)
    here, there = await connect(a), await connect(b)
    size = here.pool.geometry.slot_bytes
    child = await spawn_engine(a)
    await child.tell("reserve 1 2 3 4")
    names = [f"child-{i:010d}".encode() for i in range(1, 5)]
    filling = asyncio.create_task(child.tell("fill 3000"))
    await asyncio.sleep(0.05)
    child.signal(signal.SIGSTOP)

    async def others(rounds: int) -> None:
        for turn in range(rounds):
            keys = [key((turn, i)) for i in range(6)]
            assert all(put.stored for put in await here.put([(k, content(k, size)) for k in keys], timeout=100.0))
            assert await there.get(keys, timeout=100.0) == [content(k, size) for k in keys]
            assert await here.get(keys, timeout=100.0) == [content(k, size) for k in keys]

    await others(8)
    assert (await here.stats())["store_holds"] == 4, "a stopped engine's slots were taken"
    assert await there.get(names, timeout=5.0) == [None] * 4
    child.signal(signal.SIGCONT)
    await others(4)
    await filling
    await child.tell("commit")
    await others(1)
    for reader in (here, there):
        blocks = await reader.get(names, timeout=100.0)
        values = [set(block or b"?") for block in blocks]
        assert all(len(value) == 1 for value in values), "torn bytes"
    child.kill()


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def options_of(redis: str, mesh: str, transport: str, slots: int) -> dict[str, Any]:
    return {
        "redis": redis,
        "mesh": mesh,
        "socket": "@stopped-" + uuid4().hex,
        "pool_bytes": slots * stride_of(NAMESPACE.geometry),
        "transports": f"require:{transport}",
        "verify": "off",
        "lease_ttl": 0.3,
    }


@pytest.mark.timeout(300)
async def test_b1c_a_stopped_agent_commits_nothing_that_it_read_too_late(
    redis: str, stack: AsyncExitStack, key: Key, transport: str
) -> None:
    """It is stopped while it reads from another one, which reuses the slots when the leases are over. The generation
    alone protects: checksums are off."""
    mesh = "m" + uuid4().hex[:8]
    owner = await stack.enter_async_context(run_agent(StoreSettings(**options_of(redis, mesh, transport, 40))))
    options = options_of(redis, mesh, transport, 200)
    flags = [part for name, value in options.items() for part in ("--" + name.replace("_", "-"), str(value))]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.store", *flags, stderr=asyncio.subprocess.DEVNULL
    )
    stack.push_async_callback(process.wait)
    stack.callback(lambda: process.kill() if process.returncode is None else None)
    put = await stack.enter_async_context(await StoreClient.connect(owner.settings.socket, NAMESPACE, timeout=200.0))
    get = await stack.enter_async_context(await StoreClient.connect(options["socket"], NAMESPACE, timeout=200.0))
    dice = random.Random(7)
    good = bad = 0
    for turn in range(3):
        keys = [key((turn, i)) for i in range(24)]
        await put.put([(k, content(k, BIG)) for k in keys], timeout=100.0)
        reading = asyncio.create_task(get.get(keys, timeout=100.0))
        await asyncio.sleep(dice.uniform(0.0, 0.02))
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(100):
            while owner.stats()["store_leases"]:
                await asyncio.sleep(0.02)
        await put.put([(key((turn, "other", i)), bytes([turn]) * BIG) for i in range(40)], timeout=100.0)
        process.send_signal(signal.SIGCONT)
        for k, data in zip(keys, await reading, strict=True):
            assert data is None or data == content(k, BIG), "other bytes"
            good += data is not None
            bad += data is None
    assert good or bad
    async with asyncio.timeout(100):
        while (stats := await get.stats())["store_holds"] or stats["store_fetches"]:
            await asyncio.sleep(0.05)
