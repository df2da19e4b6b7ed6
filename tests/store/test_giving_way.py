"""Requests that give way in a real agent: who is told, whose landing ends at once, and who gets what comes free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.store.agent import Agent
from services.store.client import StoreClient
from shared.engines.base import Owner, PoolClass
from shared.errors import Fenced, PoolFull
from shared.messages import Ref

Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]
OLD, MIDDLE, YOUNG = Owner("old/1", 1.0), Owner("middle/1", 2.0), Owner("young/1", 3.0)
WRITER = Ref("nobody", 1)


class Engine:
    """Ends what it is told to end, as an instance does."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.told: list[str] = []
        self.held: dict[str, list[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        client.watch_aborts(self.hear)

    def hear(self, owner: str) -> None:
        self.told.append(owner)
        task = asyncio.create_task(self.client.release(self.held.pop(owner, [])))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take(self, slots: int, owner: Owner, pool_class: PoolClass, timeout: float = 60.0) -> list[Any]:
        held = await self.client.allocate(slots, owner, pool_class, timeout)
        self.held.setdefault(owner.id, []).extend(held)
        return held


async def test_the_youngest_prefill_gives_way_to_an_older_landing(start_agent: Start, connect: Connect) -> None:
    a = await start_agent(slots=6, abort_after=0.05)
    prefill, decode = Engine(await connect(a)), await connect(a)
    await prefill.take(3, YOUNG, PoolClass.PREFILL)
    await prefill.take(3, MIDDLE, PoolClass.PREFILL)
    landing = await decode.open_landing([], 2, 32, WRITER, OLD, 60.0)
    assert prefill.told == [YOUNG.id] and len(landing.held) == 2
    await decode.close_landing(landing, keep=False)


async def test_a_landing_is_ended_without_a_word_from_its_engine(start_agent: Start, connect: Connect) -> None:
    a = await start_agent(slots=6, drain_timeout=0.1, abort_after=0.05)
    deaf, other = await connect(a), await connect(a)  # nobody watches: the engine may be stopped
    landing = await deaf.open_landing([], 5, 80, WRITER, YOUNG, 100.0)
    held = await other.allocate(3, OLD, PoolClass.PREFILL, 60.0)
    assert len(held) == 3
    with pytest.raises(Fenced):
        await deaf.missing(landing, 100.0)


async def test_growth_takes_room_at_once_and_a_running_request_keeps_its_own(
    start_agent: Start, connect: Connect
) -> None:
    a = await start_agent(slots=6, abort_after=30.0, drain_timeout=0.1)
    engine = Engine(await connect(a))
    landing = await engine.client.open_landing([], 2, 32, Ref(a.ref.id, a.ref.incarnation), YOUNG, 100.0)
    slab = next(iter(a.slabs.values()))
    slab.landings.report(landing.token, Ref(a.ref.id, a.ref.incarnation), [(0, 0, 4, 0, 16), (1, 0, 4, 0, 16)])
    engine.held[YOUNG.id] = list(await engine.client.close_landing(landing, keep=True))  # it runs
    await engine.take(4, OLD, PoolClass.PREFILL)
    began = time.monotonic()
    await engine.take(1, YOUNG, PoolClass.GROWTH)
    assert engine.told == [OLD.id]  # older, but growth goes first
    assert time.monotonic() - began < 30.0
    with pytest.raises(PoolFull):
        await engine.take(4, OLD, PoolClass.PREFILL, timeout=0.5)
    assert engine.told == [OLD.id]  # nobody interrupts what runs


async def test_what_comes_free_is_kept_for_who_asked(start_agent: Start, connect: Connect) -> None:
    a = await start_agent(slots=6, abort_after=0.05)
    engine, cache = Engine(await connect(a)), await connect(a)
    await engine.take(6, YOUNG, PoolClass.PREFILL)
    waiting = asyncio.create_task(engine.take(5, OLD, PoolClass.PREFILL))
    async with asyncio.timeout(100):
        while not len(next(iter(a.slabs.values())).room):
            await asyncio.sleep(0.005)
    greedy = asyncio.create_task(cache.put([(bytes([i]) * 16, b"x") for i in range(2)], timeout=100.0))
    assert len(await waiting) == 5
    await engine.client.release(engine.held.pop(OLD.id))
    assert all(put.stored for put in await greedy)


async def test_younger_ones_wait(start_agent: Start, connect: Connect) -> None:
    a = await start_agent(slots=4, abort_after=0.0)
    engine = Engine(await connect(a))
    await engine.take(4, OLD, PoolClass.PREFILL)
    with pytest.raises(PoolFull):
        await engine.take(1, YOUNG, PoolClass.PREFILL, timeout=0.3)
    assert engine.told == []
    assert a.stats()["store_waiting"] == 0
