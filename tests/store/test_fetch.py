"""Fetching: verified, once for each key whoever asks, outliving its asker; what fails is said block by block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.fetches import FetchTable
from shared.engines.base import Fetched, Kind, Landing, Owner, PoolClass
from shared.errors import MooncakeError, PoolFull
from shared.telemetry import REGISTRY

OWNER = Owner("request/1")

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"mooncake_store_{name}_total", labels) or 0.0


async def put_chain(client: StoreClient, keys: list[bytes]) -> None:
    held = await client.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)
    await client.release(await client.commit(held, b"", keys))


async def until(condition: Callable[[], bool], timeout: float = 100.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def fetch(client: StoreClient, keys: list[bytes], *sources: str, **kw: Any) -> Any:
    timeout, pool_class = kw.get("timeout", 100.0), kw.get("pool_class", PoolClass.PREFILL)
    return client.fetch(keys, b"", sources, OWNER, pool_class, timeout)


def errors(fetched: list[Fetched]) -> list[str]:
    return [f.error for f in fetched]


async def test_a_flipped_byte_is_found_counted_and_the_block_dropped(
    start_agent: Start, connect: Connect, view: Any, key: Key, transport: str
) -> None:
    a = await start_agent(transports=f"require:{transport}", verify="always")
    b = await start_agent(transports=f"require:{transport}", verify="always")
    owner, reader = await connect(a), await connect(b)
    keys = [key(i) for i in range(3)]
    await put_chain(owner, keys)
    (held,) = await owner.lease(keys[1:2], OWNER)
    assert held is not None
    await until(lambda: not any(len(slab.checksums) for slab in a.slabs.values()))
    view(owner)[held.slot, 1000] ^= 1
    await owner.release([held])
    before = count("corrupt_blocks", where="fetched"), count("corrupt_blocks", where="owned")

    assert errors(await fetch(reader, keys)) == ["", "checksum_mismatch", ""]

    await until(lambda: count("corrupt_blocks", where="owned") == before[1] + 1)
    assert count("corrupt_blocks", where="fetched") == before[0] + 1
    assert await owner.contains(keys) == [True, False, True]
    assert await a.directory.locate(keys[1:2]) == await b.directory.locate(keys[1:2]) == [[]]
    assert (await reader.stats())["store_slots"] == 2


async def test_without_verification_the_flipped_byte_travels(
    start_agent: Start, connect: Connect, view: Any, key: Key, transport: str
) -> None:
    a = await start_agent(transports=f"require:{transport}", verify="off")
    b = await start_agent(transports=f"require:{transport}", verify="off")
    owner, reader = await connect(a), await connect(b)
    await put_chain(owner, [key(0)])
    (held,) = await owner.lease([key(0)], OWNER)
    assert held is not None
    view(owner)[held.slot, 1000] ^= 1
    (fetched,) = await fetch(reader, [key(0)])
    assert fetched.held is not None
    assert np.array_equal(view(reader)[fetched.held.slot], view(owner)[held.slot])


async def test_a_reader_that_must_verify_takes_nothing_from_an_owner_without_checksums(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    a, b = await start_agent(verify="off"), await start_agent(verify="always")
    owner, reader = await connect(a), await connect(b)
    await put_chain(owner, [key(0)])
    assert errors(await fetch(reader, [key(0)])) == ["checksum_mismatch"]
    assert await owner.contains([key(0)]) == [True]


async def test_one_fetch_of_a_key_is_in_flight_and_everyone_gets_a_hold(
    start_agent: Start, connect: Connect, key: Key, transport: str
) -> None:
    a, b = await start_agent(transports=f"require:{transport}"), await start_agent(transports=f"require:{transport}")
    owner, readers = await connect(a), [await connect(b) for _ in range(3)]
    keys = [key(i) for i in range(4)]
    await put_chain(owner, keys)
    before = count("transfer_bytes", transport=transport, direction="in")
    results = await asyncio.gather(*(fetch(reader, keys[i:]) for i, reader in enumerate(readers)))
    size = owner.pool.geometry.slot_bytes
    assert count("transfer_bytes", transport=transport, direction="in") - before == 4 * size
    assert [errors(r) for r in results] == [[""] * 4, [""] * 3, [""] * 2]
    slots = [[f.held.slot for f in r] for r in results]
    assert slots[1] == slots[0][1:] and slots[2] == slots[0][2:]
    assert b.stats()["store_holds"] == 9 and b.stats()["store_fetches"] == 0
    assert await b.directory.locate(keys) == [[a.ref.id]] * 4 and await a.directory.locate(keys) == [[b.ref.id]] * 4


async def test_a_fetch_outlives_its_asker_and_caches_what_it_brings(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await start_agent(), await start_agent()
    owner, reader = await connect(a), await connect(b)
    await put_chain(owner, [key(0)])
    transfer, begun = b.engine.transfer, asyncio.Event()

    async def slow(requests: Any, timeout: float) -> Any:
        begun.set()
        await asyncio.sleep(0.1)
        return await transfer(requests, timeout)

    monkeypatch.setattr(b.engine, "transfer", slow)
    task = asyncio.create_task(fetch(reader, [key(0)]))
    await begun.wait()
    task.cancel()
    await reader.close()
    await until(lambda: b.stats()["store_fetches"] == 0)
    await until(lambda: b.stats()["store_holds"] == 0)
    assert await (await connect(b)).contains([key(0)]) == [True]


async def test_each_block_says_why_it_did_not_come(start_agent: Start, connect: Connect, key: Key) -> None:
    a, b = await start_agent(), await start_agent(slots=2)
    owner, reader = await connect(a), await connect(b)
    keys = [key(i) for i in range(3)]
    await put_chain(owner, keys[:2])
    stale = [key("stale")]
    a.directory.committed(b"", stale)
    assert errors(await fetch(reader, stale)) == ["absent"]
    assert errors(await fetch(reader, [keys[2]])) == ["absent"]
    assert errors(await fetch(reader, keys[:1], "no such agent")) == ["peer_gone"]
    assert errors(await fetch(reader, keys[:1], "no such agent", b.ref.id, a.ref.id)) == [""]
    await reader.allocate(1, OWNER, PoolClass.GROWTH, 100.0)
    assert errors(await fetch(reader, keys[1:2], timeout=0.2)) == [PoolFull.code]
    assert (await reader.stats())["store_fetches"] == 0


async def test_a_block_that_a_neighbour_writes_is_waited_for(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent()
    writer, reader = await connect(a), await connect(a)
    held = await writer.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)
    task = asyncio.create_task(fetch(reader, [key(0)]))
    await asyncio.sleep(0.05)
    assert not task.done()
    await writer.commit(held, b"", [key(0)])
    (fetched,) = await task
    assert (fetched.held.slot, fetched.bytes) == (held[0].slot, 0)
    held = await writer.reserve([key(1)], OWNER, PoolClass.PREFILL, 100.0)
    assert errors(await fetch(reader, [key(1)], timeout=0.1)) == ["in_progress"]


async def test_prefetched_blocks_yield_and_must_be_leased_before_use(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    a, b = await start_agent(), await start_agent(slots=4)
    owner, reader = await connect(a), await connect(b)
    keys = [key(i) for i in range(2)]
    await put_chain(owner, keys)
    fetched = await fetch(reader, keys, pool_class=PoolClass.PREFETCH)
    assert errors(fetched) == ["", ""]
    assert b.stats()["store_prefetched"] == 2
    hard = [h for h in await reader.lease(keys[:1], OWNER) if h is not None]
    taken = await reader.allocate(3, OWNER, PoolClass.LANDING, 100.0)
    assert {h.slot for h in taken}.isdisjoint({h.slot for h in hard})
    assert [h is not None for h in await reader.lease(keys, OWNER)] == [True, False]
    await reader.release([f.held for f in fetched])  # one of them is over already
    assert b.stats()["store_prefetched"] == 0


async def test_prefetch_takes_what_it_gets_now_and_does_not_wait(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    a, b = await start_agent(), await start_agent(slots=8, prefetch_share=0.5)
    owner, reader = await connect(a), await connect(b)
    keys = [key(i) for i in range(6)]
    await put_chain(owner, keys)
    await put_chain(reader, [key("local")])
    assert await reader.lease([key("local")], OWNER, PoolClass.PREFETCH) != [None]  # local blocks are not counted
    fetched = await fetch(reader, keys, pool_class=PoolClass.PREFETCH, timeout=30.0)
    assert errors(fetched) == [""] * 4 + ["pool_full"] * 2
    assert b.stats()["store_prefetched"] == 4
    await reader.release([f.held for f in fetched if f.held is not None])
    later = await reader.fetch(keys, b"", [], Owner("request/2"), PoolClass.PREFETCH, 100.0)
    assert errors(later) == [""] * 6


async def test_what_a_cancelled_call_is_granted_later_comes_back(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    a = await start_agent(slots=2)
    holder, waiter = await connect(a), await connect(a)
    held = await holder.allocate(2, OWNER, PoolClass.PREFILL, 100.0)
    tasks = [
        asyncio.create_task(waiter.allocate(2, OWNER, PoolClass.PREFILL, 100.0)),
        asyncio.create_task(waiter.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)),
        asyncio.create_task(waiter.open_landing([], 1, 3, waiter.agent, OWNER, 100.0)),
    ]
    await until(lambda: a.stats()["store_waiting"] == 3)
    for task in tasks:
        task.cancel()
    await until(lambda: a.stats()["store_waiting"] == 0)  # at once: nobody waits behind one who has gone
    await holder.release(held)
    await until(lambda: a.stats()["free"] == 2)
    assert (await waiter.stats())["store_landings"] == 0


async def test_older_requests_are_served_first(start_agent: Start, connect: Connect) -> None:
    client = await connect(await start_agent(slots=4))
    held = await client.allocate(4, OWNER, PoolClass.PREFILL, 100.0)
    served: list[str] = []

    async def ask(name: str, age: float, slots: int, pool_class: PoolClass) -> None:
        got = await client.allocate(slots, Owner(name, age), pool_class, 5.0)
        served.append(name)
        await client.release(got)

    asks = [
        ("young", 3.0, 1, PoolClass.PREFILL),
        ("old", 1.0, 3, PoolClass.LANDING),
        ("growth", 9.0, 1, PoolClass.GROWTH),
    ]
    tasks = []
    for one in asks:
        tasks.append(asyncio.create_task(ask(*one)))
        await asyncio.sleep(0.02)
    await client.release(held[:2])
    await asyncio.sleep(0.1)
    assert served == ["growth"]  # two are free: the old one needs three, and the young one may not take one of them
    await client.release(held[2:])
    await asyncio.gather(*tasks)
    assert served == ["growth", "old", "young"]


def test_a_key_in_flight_is_not_fetched_again() -> None:
    table: FetchTable[str] = FetchTable()
    table.begin([b"a", b"b"], "first")
    split = table.split([b"b", b"c", b"c"])
    assert (split.mine, split.others) == ([b"c"], {b"b": "first"})
    with pytest.raises(ValueError, match="in flight"):
        table.begin([b"a"], "second")
    table.end([b"a", b"b"])
    table.end([b"a"])
    assert len(table) == 0 and table.split([b"a"]).mine == [b"a"]


async def test_landing_keeps_present_blocks_and_owes_the_rest(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent()
    client = await connect(a)
    keys = [key(i) for i in range(3)]
    await put_chain(client, keys[:1])
    landing = await client.open_landing(keys, 4, 55, client.agent, OWNER, 1.0, apart=frozenset({1}))
    assert landing.have == {0}
    assert [h.kind for h in landing.held] == [Kind.PRESENT, Kind.NEW, Kind.NEW, Kind.NEW]
    assert [h.key for h in landing.held] == [keys[0], b"", b"", b""]
    await client.close_landing(landing, keep=False)
    await until(lambda: a.stats()["store_holds"] == 0)
    assert await client.contains(keys) == [True, False, False]


@pytest.mark.parametrize("steps", range(12))
async def test_whenever_the_keeping_of_a_landing_is_cancelled_nothing_stays_held(
    start_agent: Start, connect: Connect, key: Key, steps: int
) -> None:
    """It is kept, perhaps, and the answer comes to nobody: as to an engine that was stopped past its deadline."""
    a = await start_agent()
    client = await connect(a)
    await put_chain(client, [key(0)])
    landing = await client.open_landing([key(0)], 1, 16, client.agent, OWNER, 100.0)
    keeping = asyncio.create_task(client.close_landing(landing, keep=True))
    for _ in range(steps):
        await asyncio.sleep(0)
    keeping.cancel()
    try:
        await client.release(await keeping)
    except asyncio.CancelledError:
        with contextlib.suppress(MooncakeError):
            await client.close_landing(landing, keep=False)
    await until(lambda: a.stats()["store_holds"] == a.stats()["store_landings"] == 0)


@pytest.mark.parametrize("steps", range(12))
async def test_whenever_a_call_is_cancelled_nothing_stays_held(
    start_agent: Start, connect: Connect, key: Key, steps: int
) -> None:
    a, b = await start_agent(), await start_agent(slots=4)
    owner, reader = await connect(a), await connect(b)
    await put_chain(owner, [key(0)])
    calls = [
        fetch(reader, [key(0)]),
        reader.allocate(2, OWNER, PoolClass.PREFILL, 100.0),
        reader.reserve([key(1)], OWNER, PoolClass.PREFILL, 100.0),
        reader.open_landing([], 1, 3, reader.agent, OWNER, 100.0),
        reader.wait(key(1), OWNER, 100.0),
    ]
    tasks = [asyncio.create_task(call) for call in calls]
    for _ in range(steps):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    for task in tasks:
        try:
            answer = await task
        except asyncio.CancelledError:
            continue
        if isinstance(answer, Landing):
            await reader.close_landing(answer, keep=False)
        elif answer:
            some: list[Any] = [h.held if isinstance(h, Fetched) else h for h in answer if h]
            await reader.release([h for h in some if h])
    await until(lambda: b.stats()["store_fetches"] == 0)
    await until(lambda: b.stats()["store_holds"] == 0)
    await until(lambda: not reader._session._pending)
