"""Agents with an SSD tier on real files: what leaves DRAM comes back, whoever asks, and after a restart."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.store.ssd.jobs import run
from services.store.ssd.journal import ENTRY
from shared.blocks import Namespace
from shared.engines.base import PoolClass
from shared.index import DRAM, SSD
from tests.store.ssd_tools import (
    NAMESPACE,
    OWNER,
    SLOT,
    STRIDE,
    Start,
    begun,
    caught_up,
    client_of,
    content_of,
    count,
    filled,
    items,
    key_of,
    put_slowly,
    tiers,
    what_is_left,
    written,
)


async def test_c6_a_working_set_of_four_times_the_memory_is_all_there(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent, client = await begun(start_ssd, stack, 64)
    before = count("read_blocks_total")
    for at in range(0, 64, 4):
        assert await client.get([key_of(i) for i in range(at, at + 4)]) == [content_of(i) for i in range(at, at + 4)]
    assert count("read_blocks_total") - before >= 48
    assert await client.contains([key_of(i) for i in range(64)]) == [True] * 64
    assert len(tiers(agent)) == 64
    for i in range(64):
        slab = next(iter(agent.slabs.values()))
        assert tiers(agent)[key_of(i)] == (SSD if slab.pool.find(key_of(i)) is None else DRAM)


async def test_c6_blocks_come_back_with_a_new_agent(start_ssd: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first)
        await put_slowly(agent, await client_of(agent, first), range(40))
        await written(agent, 32)
        there = [i for i in range(40) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]
    again = await start_ssd()
    client = await client_of(again, stack)
    assert tiers(again) == {key_of(i): SSD for i in there}
    for i in there:
        assert await client.get([key_of(i)]) == [content_of(i)]
    assert [
        k for k, there in zip(range(40), await client.contains(list(map(key_of, range(40)))), strict=True) if there
    ] == there


async def test_objects_of_all_sizes_come_back(start_ssd: Start, stack: AsyncExitStack) -> None:
    sizes = [1, 4095, 4096, 4097, 9000, SLOT - 1, SLOT, SLOT, 5000, SLOT, SLOT, 1] * 4
    data = [random.Random(i).randbytes(size) for i, size in enumerate(sizes)]
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first)
        client = await client_of(agent, first)
        for i in range(len(sizes)):
            await client.put([(key_of(i), data[i])])
            await caught_up(agent)
        await written(agent, 40)
        there = [i for i in range(len(sizes)) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]
    client = await client_of(await start_ssd(slots=64), stack)
    assert await client.get([key_of(i) for i in there]) == [data[i] for i in there]


async def test_a_peer_reads_what_is_on_the_ssd_alone(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent, other = await start_ssd(verify="always"), await start_ssd(ssd_path="", ssd_bytes=0, slots=64)
    client, reader = await client_of(agent, stack), await client_of(other, stack)
    await put_slowly(agent, client, range(32))
    await written(agent, 24)
    fetched = await reader.fetch([key_of(i) for i in range(4)], b"", [], OWNER, PoolClass.PREFILL, 5.0, chained=False)
    assert [(f.error, f.bytes) for f in fetched] == [("", len(content_of(i))) for i in range(4)]
    for at in range(0, 32, 4):
        assert await reader.get([key_of(i) for i in range(at, at + 4)]) == [content_of(i) for i in range(at, at + 4)]


async def test_a_lease_brings_a_block_once_whoever_asks(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent = await start_ssd()
    clients = [await client_of(agent, stack) for _ in range(4)]
    await put_slowly(agent, clients[0], range(32))
    await written(agent, 24)
    before = count("read_blocks_total")
    leases = await asyncio.gather(*(c.lease([key_of(0), key_of(1), key_of(99)], OWNER) for c in clients))
    assert [[h is not None for h in lease] for lease in leases] == [[True, True, False]] * 4
    assert len({lease[0].slot for lease in leases if lease[0]}) == 1
    assert count("read_blocks_total") - before == 2
    for client, lease in zip(clients, leases, strict=True):
        await client.release([h for h in lease if h])
    assert agent.stats()["store_holds"] == 0 and agent.stats()["store_prefetched"] == 0


async def test_prefetch_takes_no_more_than_its_share(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent = await start_ssd(prefetch_share=0.25)
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(32))
    await written(agent, 24)
    leases = await client.lease([key_of(i) for i in range(12)], OWNER, PoolClass.PREFETCH)
    assert [h is not None for h in leases] == [True] * 4 + [False] * 8
    await client.release([h for h in leases if h])


async def test_a_removed_block_stays_removed(start_ssd: Start, stack: AsyncExitStack) -> None:
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first)
        client = await client_of(agent, first)
        await put_slowly(agent, client, range(32))
        await written(agent, 24)
        assert await client.remove([key_of(0), key_of(31), key_of(99)]) == [True, True, False]
        assert await client.get([key_of(0), key_of(31)]) == [None, None]
        assert key_of(0) not in tiers(agent)
    client = await client_of(await start_ssd(), stack)
    assert await client.get([key_of(0), key_of(31)]) == [None, None]


async def test_a_full_tier_lets_the_least_recently_used_go(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent = await start_ssd(ssd_bytes=32 * STRIDE)
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(200))
    await written(agent, 32)
    assert agent.ssd.book.size == 32 * STRIDE
    for i in (*range(160, 200), 0):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])
    assert await client.get([key_of(199)]) == [content_of(199)] and await client.get([key_of(0)]) == [None]
    assert sum(f.stat().st_size for f in Path(agent.settings.ssd_path).glob("segment-*")) == 32 * STRIDE


async def test_what_the_disk_does_not_take_in_time_is_dropped(
    start_ssd: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    stack.callback(goes_on.set)
    agent = await start_ssd()
    client = await client_of(agent, stack)
    before = count("skipped_blocks_total")
    monkeypatch.setattr("services.store.ssd.writing.run", lambda files, job: goes_on.wait() and run(files, job))
    await client.put(items(range(160)))
    goes_on.set()
    assert count("skipped_blocks_total") > before
    assert len(tiers(agent)) <= 16 + len(agent.ssd.book) + agent.ssd.writes
    for i in range(160):
        assert await client.get([key_of(i)]) in ([content_of(i)], [None])


async def test_another_deployments_blocks_are_not_found(start_ssd: Start, stack: AsyncExitStack) -> None:
    there = await filled(start_ssd)
    agent = await start_ssd(slab_bytes=16 * STRIDE, slots=64)
    other = await client_of(
        agent, stack, Namespace(**{f: getattr(NAMESPACE, f) for f in NAMESPACE.__struct_fields__} | {"head_dim": 8})
    )
    assert await other.get([key_of(i) for i in there]) == [None] * len(there)
    assert len(await what_is_left(agent, stack, there)) == len(there)


async def test_the_log_stays_small(
    start_ssd: Start, stack: AsyncExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.ssd.files.COMPACT_OVER", 50)
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first, ssd_bytes=32 * STRIDE)
        await put_slowly(agent, await client_of(agent, first), range(300))
        await written(agent, 32)
        there = [i for i in range(300) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]
    assert (tmp_path / "ssd" / "blocks.log").stat().st_size < 300 * ENTRY
    assert await what_is_left(await start_ssd(ssd_bytes=32 * STRIDE), stack, there) == there


async def test_every_block_is_somewhere_or_counted(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent = await start_ssd(slots=8)
    client = await client_of(agent, stack)
    before = count("skipped_blocks_total")
    for at in range(0, 96, 8):
        assert all(put.stored for put in await client.put(items(range(at, at + 8))))
    await written(agent, 0)
    there = await client.contains([key_of(i) for i in range(96)])
    assert there.count(False) == count("skipped_blocks_total") - before
    assert {key for key in map(key_of, range(96)) if key in tiers(agent)} == {
        key_of(i) for i, here in enumerate(there) if here
    }


async def test_a_smaller_tier_keeps_what_fits(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    there = await filled(start_ssd)
    left = await what_is_left(await start_ssd(ssd_bytes=16 * STRIDE), stack, there)
    assert 0 < len(left) <= 16
    assert sum(f.stat().st_size for f in (tmp_path / "ssd").glob("segment-*")) <= 16 * STRIDE


async def test_a_block_removed_on_its_way_up_does_not_come_back(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent, client = await begun(start_ssd, stack)
    for i in range(0, 16, 2):
        keys = [key_of(i), key_of(i + 1)]
        leasing = asyncio.create_task(client.lease(keys, OWNER))
        await asyncio.sleep(0.0005 * i)
        removed = await client.remove(keys)
        held = [h for h in await leasing if h is not None]
        await client.release(held)
        assert removed == [True, True]
        assert await client.contains(keys) == [False, False]
        assert not {*keys} & tiers(agent).keys()
