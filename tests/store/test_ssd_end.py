"""At an agent's end DRAM goes to the SSD, the most recently used first, within its seconds; the order is kept."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import pytest

from services.store.ssd.files import Files
from services.store.ssd.jobs import Job, Write, Written, run
from tests.store.ssd_tools import NAMESPACE, STRIDE, Start, client_of, content_of, items, key_of, put_slowly, written


async def kept(start_ssd: Start, stack: AsyncExitStack, numbers: range) -> list[int]:
    """What the next agent has."""
    client = await client_of(await start_ssd(slots=64), stack)
    found = await client.get([key_of(i) for i in numbers])
    assert all(data in (content_of(i), None) for i, data in zip(numbers, found, strict=True))
    return [i for i, data in zip(numbers, found, strict=True) if data is not None]


async def test_a_graceful_end_loses_nothing(start_ssd: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first, ssd_flush=100.0)
        await put_slowly(agent, await client_of(agent, first), range(40))
    assert await kept(start_ssd, stack, range(40)) == [*range(40)]


async def test_without_seconds_dram_is_lost(start_ssd: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first, slots=64, ssd_ahead=0.0)
        await (await client_of(agent, first)).put(items(range(8)))
    assert await kept(start_ssd, stack, range(8)) == []


async def test_the_most_recently_used_goes_first_and_the_end_comes_in_time(
    start_ssd: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(files: Files, job: Job) -> list[tuple[Write, Written]]:
        time.sleep(0.2)
        return run(files, job)

    monkeypatch.setattr("services.store.ssd.writing.run", slowly)
    monkeypatch.setattr("services.store.ssd.writing.JOB_BYTES", STRIDE)  # some blocks a second
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first, slots=64, ssd_ahead=0.0, ssd_flush=0.5)
        client = await client_of(agent, first)
        await client.put(items(range(32)))
        await client.get([key_of(7)])
    left = await kept(start_ssd, stack, range(32))
    assert 7 in left and len(left) < 32


async def test_a_small_tier_takes_what_was_used_last(start_ssd: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first, slots=64, ssd_bytes=32 * STRIDE, ssd_flush=100.0)
        client = await client_of(agent, first)
        for i in range(60):
            await client.put(items([i]))
    assert await kept(start_ssd, stack, range(60)) == [*range(28, 60)]


async def test_the_order_of_use_outlives_the_agent(start_ssd: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first, slots=64, ssd_flush=100.0)
        client = await client_of(agent, first)
        for i in (*range(20), 3, 11):
            await client.put(items([i]))
            await client.get([key_of(i)])
    agent = await start_ssd()
    await written(agent, 20)
    order = [block.key for block in agent.ssd.book.blocks(NAMESPACE.root())]
    assert order[-2:] == [key_of(3), key_of(11)] and order[0] == key_of(0)
