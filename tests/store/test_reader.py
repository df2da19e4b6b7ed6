"""A read that goes wrong half way: late, stale, cut off. Nothing of it is committed, nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.rates import ASSUMED, HALF, Rate
from services.store.settings import StoreSettings
from services.store.transfer.base import Request, Result
from shared.config import load
from shared.engines.base import Owner, PoolClass
from shared.errors import ConfigError

OWNER = Owner("request/1")

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


async def pair(start_agent: Start, connect: Connect, key: Key, **owner: Any) -> tuple[Agent, Agent, StoreClient]:
    """An owner with one block, and a reader that leases it, however small it is."""
    a = await start_agent(transports="require:tcp", **owner)
    b = await start_agent(transports="require:tcp", carry_bytes=0)
    writer = await connect(a)
    held = await writer.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)
    await writer.release(await writer.commit(held, b"", [key(0)]))
    return a, b, await connect(b)


async def outcome(reader: StoreClient, key: bytes, timeout: float = 100.0) -> str:
    (fetched,) = await reader.fetch([key], b"", [], OWNER, PoolClass.PREFILL, timeout)
    return fetched.error


def delay(monkeypatch: pytest.MonkeyPatch, agent: Agent, before: Callable[[], Awaitable[None]]) -> None:
    """Something happens between the lease and the read."""
    transfer = agent.engine.transfer

    async def late(requests: Sequence[Request], timeout: float) -> list[Result]:
        await before()
        return await transfer(requests, timeout)

    monkeypatch.setattr(agent.engine, "transfer", late)


def nothing_left(agent: Agent) -> bool:
    stats = agent.stats()
    return stats["free"] == stats["slots"] and not stats["store_holds"] and not stats["store_fetches"]


async def test_what_completes_after_the_lease_is_discarded(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, reader = await pair(start_agent, connect, key, lease_ttl=0.1)
    slab = next(iter(a.slabs.values()))
    monkeypatch.setattr(slab.leases, "renew", lambda *_: False)
    delay(monkeypatch, b, lambda: asyncio.sleep(0.2))
    assert await outcome(reader, key(0)) == "lease_expired"
    assert nothing_left(b) and await reader.contains([key(0)]) == [False]


async def test_b6_a_slow_read_is_renewed_and_succeeds(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, reader = await pair(start_agent, connect, key, lease_ttl=1.0)
    delay(monkeypatch, b, lambda: asyncio.sleep(2.5))
    assert await outcome(reader, key(0)) == ""
    async with asyncio.timeout(100):
        while a.stats()["store_leases"]:
            await asyncio.sleep(0.01)


async def test_a_slot_reused_before_the_read_is_stale(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pause of the machine, when no lease can be trusted: the generation alone protects."""
    a, b, reader = await pair(start_agent, connect, key)
    slab = next(iter(a.slabs.values()))

    async def reuse() -> None:
        slot = slab.pool.find(key(0))
        assert slot is not None and slab.pins.claim(slot)

    delay(monkeypatch, b, reuse)
    assert await outcome(reader, key(0)) == "stale_generation"
    assert nothing_left(b)


async def test_a_read_past_its_deadline_frees_its_destination(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b, reader = await pair(start_agent, connect, key)
    delay(monkeypatch, b, lambda: asyncio.sleep(1.0))
    assert await outcome(reader, key(0), timeout=0.2) == "deadline_exceeded"
    assert b.stats()["store_holds"] == 1  # rule: dest_held
    async with asyncio.timeout(100):
        while b.stats()["store_holds"] or b.stats()["store_fetches"]:
            await asyncio.sleep(0.01)


async def test_an_owner_that_dies_during_the_read_fails_the_block_alone(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, reader = await pair(start_agent, connect, key)
    delay(monkeypatch, b, a.engine._server.close)
    assert await outcome(reader, key(0), timeout=1.0) in ("peer_gone", "deadline_exceeded")
    assert nothing_left(b)


async def test_watermarks_evict_ahead_of_need(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent(slots=20, low_watermark=0.2, high_watermark=0.4)
    client = await connect(a)
    await client.put([(key(i), b"x") for i in range(18)])
    async with asyncio.timeout(100):
        while a.stats()["free"] < 8:
            await asyncio.sleep(0.01)
    assert await client.contains([key(17)]) == [True]


def test_settings_are_checked_together() -> None:
    with pytest.raises(ConfigError, match="high_watermark"):
        load(StoreSettings, ["--low-watermark", "0.3", "--high-watermark", "0.1"], env={})
    chosen = load(StoreSettings, ["--pool-bytes", "64MiB", "--verify", "off"], env={"MOONCAKE_SECRET": "x"})
    assert (chosen.pool_bytes, chosen.secret, chosen.checksums) == (64 << 20, "x", False)
    assert StoreSettings(verify_shm="off", verify_tcp="off", verify_rdma="off").checksums is False
    assert StoreSettings().verify_over("shm") == "sample" and StoreSettings().verify_over("tcp") == "always"
    assert StoreSettings(verify="always").verify_over("shm") == "always"


def test_the_rate_follows_what_is_measured_and_small_transfers_say_nothing() -> None:
    rate = Rate()
    rate.add(1000, 1.0)
    assert rate.value == 0.0
    rate.add(1 << 20, 0.1)  # 10 MB/s, once
    assert rate.value > ASSUMED / 3, "one slow transfer makes no slow link"
    for _ in range(20):
        rate.add(HALF, HALF / 10e6)
    assert rate.value == pytest.approx(10e6, rel=0.01), "but many do"
