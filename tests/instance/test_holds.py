"""What an attempt holds: released at the end, late answers too."""

from __future__ import annotations

import asyncio

import pytest

from shared.engines.base import Held, Kind, Owner, PoolClass
from shared.engines.memory_engine import MemoryEngine
from shared.engines.memory_store import MemoryNetwork, MemoryNode, MemoryStore
from shared.instance.holds import Holds, slots_of
from tests.held import held_now

OWNER = Owner("r/1")


def node_of(slots: int = 8) -> MemoryNode:
    return MemoryNode(MemoryNetwork(), "n", MemoryEngine().geometry, slots)


async def test_everything_is_released_at_the_end() -> None:
    node = node_of()
    store, before = MemoryStore(node), held_now().get("t_slots", 0.0)
    with pytest.raises(RuntimeError):
        async with Holds(store, "t") as holds:
            held = await holds.take(store.allocate(3, OWNER, PoolClass.PREFILL, 0))
            await holds.take(store.lease([b"x" * 16], OWNER))
            await holds.release(held[:1])
            assert (len(holds), len(node.holds), held_now()["t_slots"] - before) == (2, 2, 2)
            raise RuntimeError
    assert (len(node.holds), held_now()["t_slots"] - before) == (0, 0)


async def test_the_late_answer_of_a_cancelled_call_is_released() -> None:
    node = node_of(2)
    store = MemoryStore(node)
    blocker = await store.allocate(2, OWNER, PoolClass.GROWTH, 0)

    async def work() -> None:
        async with Holds(store, "t") as holds:
            await holds.take(store.allocate(1, OWNER, PoolClass.PREFILL, 5.0))

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.release(blocker)
    async with asyncio.timeout(100):
        while len(node.free) < 2:
            await asyncio.sleep(0.01)
    assert not node.holds


async def test_a_dead_agent_releases_nothing_and_hurts_nobody() -> None:
    node = node_of()
    store = MemoryStore(node)
    async with Holds(store, "t") as holds:
        await holds.take(store.allocate(2, OWNER, PoolClass.PREFILL, 0))
        node.kill()
    assert len(holds) == 0


def test_slots_of_answers() -> None:
    one = Held(1, 4, Kind.NEW)
    assert slots_of([one, None, Held(2, -1, Kind.IN_PROGRESS)]) == [one]
    assert slots_of(None) == []
