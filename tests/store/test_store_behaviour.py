"""ACCEPTANCE C1 to C4, over real agents and transports; engines that die, stop and hang up as real processes."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from services.store import peer_messages as peer
from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.transfer.base import Op, Request, Status
from shared.engines.base import Held, Kind, LandingTarget, Owner, PoolClass, Run
from shared.errors import DoesNotFit, Fenced, InvalidInput, PoolFull, StaleToken
from shared.messages import Ref

OWNER = Owner("request/1")
Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


def content(key: bytes, size: int) -> bytes:
    """The only right bytes for a key."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(size)


async def until(condition: Callable[[], bool], timeout: float = 100.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


async def lease_at(reader: Agent, owner: Agent, keys: list[bytes]) -> peer.Leased:
    """As another agent's reader does."""
    slab = next(iter(owner.slabs.values()))
    call = peer.Lease(slab.name, b"".join(keys), 0, slab.geometry.layers)
    answer = await reader.engine.call(owner.ref, peer.encode(call), 2.0)
    leased: peer.Leased = peer.decode_answer(answer, peer.Leased)
    return leased


async def read_at(reader: Agent, owner: Agent, descriptor: peer.Descriptor, slot: int) -> Any:
    """One-sided, into ``slot`` of the reader's own pool."""
    slab = next(iter(owner.slabs.values()))
    request = Request(
        Op.READ, slab.name, slot * slab.memory.stride, owner.ref, slab.name, descriptor.offset, descriptor.length,
        descriptor.generation,
    )  # fmt: skip
    (result,) = await reader.engine.transfer([request], 2.0)
    return result


# -- C1 ----------------------------------------------------------------------------------------------------


async def test_c1_put_get_round_trip_with_results_in_input_order(
    start_agent: Start, connect: Connect, key: Key, transport: str
) -> None:
    a = await start_agent(transports=f"require:{transport}", verify="always")
    b = await start_agent(transports=f"require:{transport}", verify="always")
    here, there = await connect(a), await connect(b)
    size = here.pool.geometry.slot_bytes
    lengths = [size, 1, size - 1, 4097, 4096]
    items = [(key(i), content(key(i), n)) for i, n in enumerate(lengths)]

    assert [p.stored for p in await here.put(items)] == [True] * 5
    keys = [k for k, _ in items]
    asked = [keys[3], key("absent"), keys[0], keys[0], b"short", *keys]
    for client in (here, there):
        got = await client.get(asked)
        assert got == [items[3][1], None, items[0][1], items[0][1], None, *[data for _, data in items]]
    assert await there.contains([*keys, key("absent")]) == [True] * 5 + [False]


async def test_c1_put_of_a_present_key_changes_nothing_and_duplicates_are_stored_once(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    client = await connect(await start_agent())
    one, two = b"1" * 100, b"2" * 50
    results = await client.put([(key(0), one), (key(1), two), (key(0), two)])
    assert [(p.stored, p.error) for p in results] == [(True, None), (True, None), (False, None)]
    assert [p.stored for p in await client.put([(key(1), one)])] == [False]
    assert await client.get([key(0), key(1)]) == [one, two]
    assert (await client.stats())["store_holds"] == 0


async def test_c1_wrong_items_fail_alone_and_empty_batches_are_empty(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    client = await connect(await start_agent())
    size = client.pool.geometry.slot_bytes
    results = await client.put([(b"k", b"x"), (key(0), b""), (key(1), bytes(size + 1)), (key(2), b"good")])
    assert [type(p.error) for p in results] == [InvalidInput, InvalidInput, InvalidInput, type(None)]
    assert await client.get([key(2)]) == [b"good"]
    assert (await client.put([]), await client.get([]), await client.contains([]), await client.remove([])) == (
        [], [], [], [],
    )  # fmt: skip
    assert await client.reserve([], OWNER, PoolClass.PREFILL, 100.0) == []
    assert await client.lease([], OWNER) == []
    assert await client.fetch([], b"", [], OWNER, PoolClass.PREFILL, 100.0) == []


async def test_c1_remove_is_seen_everywhere(start_agent: Start, connect: Connect, key: Key, transport: str) -> None:
    a, b = await start_agent(transports=f"require:{transport}"), await start_agent(transports=f"require:{transport}")
    here, there = await connect(a), await connect(b)
    await here.put([(key(0), b"x"), (key(1), b"y")])
    assert await there.get([key(0)]) == [b"x"]
    assert await there.remove([key(0), key(2), key(1)]) == [True, False, True]
    for client in (here, there):
        assert await client.get([key(0), key(1)]) == [None, None]


# -- C2 ----------------------------------------------------------------------------------------------------


async def test_c2_a_block_is_invisible_until_commit(
    start_agent: Start, connect: Connect, key: Key, transport: str
) -> None:
    a, b = await start_agent(transports=f"require:{transport}"), await start_agent(transports=f"require:{transport}")
    writer, other, remote = await connect(a), await connect(a), await connect(b)
    (held,) = await writer.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)
    assert held.kind is Kind.NEW
    assert await other.contains([key(0)]) == [False]
    assert await other.lease([key(0)], OWNER) == [None]
    assert (await remote.fetch([key(0)], b"", [a.ref.id], OWNER, PoolClass.PREFILL, 100.0))[0].error == "absent"
    (busy,) = await other.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)
    assert (busy.kind, busy.slot) == (Kind.IN_PROGRESS, -1)
    waiting = asyncio.create_task(other.wait(key(0), OWNER, 100.0))
    await asyncio.sleep(0.02)
    assert not waiting.done()

    await writer.commit([held], b"", [key(0)])
    got = await waiting
    assert got is not None and got.slot == held.slot and got.kind is Kind.PRESENT
    assert (await remote.fetch([key(0)], b"", [a.ref.id], OWNER, PoolClass.PREFILL, 100.0))[0].error == ""


async def test_c2_abort_wakes_who_waits(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent()
    writer, other = await connect(a), await connect(a)
    held = await writer.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)
    waiting = asyncio.create_task(other.wait(key(0), OWNER, 100.0))
    await asyncio.sleep(0.02)
    await writer.release(held)
    assert await waiting is None
    assert [h.kind for h in await other.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)] == [Kind.NEW]


async def test_c2_stale_commit_tokens_are_refused(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent()
    writer, other = await connect(a), await connect(a)
    held = await writer.reserve([key(0), key(1)], OWNER, PoolClass.PREFILL, 100.0)
    await writer.release(held[:1])
    for client, holds, keys in (
        (writer, held[:1], [key(0)]),  # released
        (other, held[1:], [key(1)]),  # another connection's
        (writer, [Held(12345, held[1].slot, Kind.NEW)], [key(1)]),  # never given
    ):
        with pytest.raises(StaleToken):
            await client.commit(holds, b"", keys)
    assert await writer.contains([key(0), key(1)]) == [False, False]
    await writer.commit(held[1:], b"", [key(1)])


async def test_c2_a_writer_that_dies_after_reserve_leaves_nothing(
    start_agent: Start, connect: Connect, spawn_engine: Any
) -> None:
    a = await start_agent(slots=2)
    other, child = await connect(a), await spawn_engine(a)
    await child.tell("reserve 1 2")
    keys = [b"child-0000000001", b"child-0000000002"]
    assert [h.kind for h in await other.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)] == [Kind.IN_PROGRESS] * 2
    with pytest.raises(PoolFull):
        await other.allocate(1, OWNER, PoolClass.PREFILL, 0.05)
    wanted = asyncio.create_task(other.allocate(2, OWNER, PoolClass.PREFILL, 100.0))
    waiting = asyncio.create_task(other.wait(keys[0], OWNER, 100.0))
    await asyncio.sleep(0.05)
    child.kill()
    assert await waiting is None
    await other.release(await wanted)
    assert [h.kind for h in await other.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)] == [Kind.NEW] * 2


# -- C3 ----------------------------------------------------------------------------------------------------


async def test_c3_leased_blocks_survive_eviction_and_removal_and_expire_into_errors(
    start_agent: Start, connect: Connect, key: Key, transport: str
) -> None:
    a = await start_agent(slots=4, transports=f"require:{transport}", lease_ttl=2.0)
    b = await start_agent(slots=4, transports=f"require:{transport}")
    owner, reader = await connect(a), await connect(b)
    size = owner.pool.geometry.slot_bytes
    keys = [key(i) for i in range(2)]
    await owner.put([(k, content(k, size)) for k in keys])
    (slot,) = await reader.allocate(1, OWNER, PoolClass.PREFILL, 100.0)
    leased = await lease_at(b, a, [*keys, key("absent")])
    assert leased.blocks[2] is None and leased.ttl == 2.0
    descriptors = [d for d in leased.blocks if d is not None]

    async def pressure(n: int) -> None:
        for i in range(n):
            (put,) = await owner.put([(key(("pressure", i)), bytes(size))], timeout=100.0)
            assert put.stored

    await owner.remove(keys[:1])
    assert await owner.get(keys[:1]) == [None]
    assert [p.stored for p in await owner.put([(keys[0], b"replaced")])] == [True]
    await pressure(10)
    slab = next(iter(b.slabs.values()))
    for d, k in zip(descriptors, keys, strict=True):
        result = await read_at(b, a, d, slot.slot)
        assert result.status is Status.COMPLETED
        assert bytes(slab.memory.range(slot.slot, size)) == content(k, size)

    await until(lambda: a.stats()["store_leases"] == 0)
    await pressure(10)
    for d in descriptors:
        result = await read_at(b, a, d, slot.slot)
        assert result.status is Status.FAILED
        assert result.error is not None and result.error.code == "stale_generation"
    await until(lambda: a.stats()["store_slots"] == 0)


async def test_c3_a_renewed_lease_lasts(start_agent: Start, connect: Connect, key: Key) -> None:
    a, b = await start_agent(lease_ttl=1.5), await start_agent()
    client = await connect(a)
    await client.put([(key(0), b"x")])
    leased = await lease_at(b, a, [key(0)])
    segment = next(iter(a.slabs))
    for _ in range(5):
        await asyncio.sleep(0.4)
        answer = await b.engine.call(a.ref, peer.encode(peer.Renew(segment, leased.id)), 2.0)
        assert peer.decode_answer(answer, bool)
    assert a.stats()["store_leases"] == 1
    await b.engine.call(a.ref, peer.encode(peer.Release(segment, [leased.id])), 2.0)
    assert a.stats()["store_leases"] == 0
    answer = await b.engine.call(a.ref, peer.encode(peer.Renew(segment, leased.id)), 2.0)
    assert not peer.decode_answer(answer, bool)


async def test_c3_every_byte_read_is_right_under_concurrent_put_get_and_evict(
    start_agent: Start, connect: Connect, key: Key, transport: str
) -> None:
    agents = [
        await start_agent(slots=12, transports=f"require:{transport}", verify="off", lease_ttl=0.2) for _ in range(2)
    ]
    clients = [await connect(agent) for agent in agents for _ in range(2)]
    size = clients[0].pool.geometry.slot_bytes
    keys = [key(i) for i in range(40)]
    right = {k: content(k, size) for k in keys}
    reads = hits = 0

    async def work(client: StoreClient, seed: int) -> None:
        nonlocal reads, hits
        dice = random.Random(seed)
        for _ in range(40):
            some = dice.sample(keys, dice.randint(1, 4))
            if dice.random() < 0.5:
                for put in await client.put([(k, right[k]) for k in some], timeout=100.0):
                    assert put.error is None
            elif dice.random() < 0.1:
                await client.remove(some[:1])
            else:
                for k, data in zip(some, await client.get(some, timeout=100.0), strict=True):
                    reads += 1
                    hits += data is not None
                    assert data is None or data == right[k], "other bytes"

    await asyncio.gather(*(work(client, seed) for seed, client in enumerate(clients)))
    assert reads and hits
    for agent in agents:
        await until(lambda agent=agent: agent.stats()["store_slots"] == 0)  # type: ignore[misc]
        assert agent.stats()["store_holds"] == 0


# -- C4 ----------------------------------------------------------------------------------------------------


async def test_c4_ten_times_the_capacity_all_succeed_oldest_first(
    start_agent: Start, connect: Connect, key: Key, transport: str
) -> None:
    a = await start_agent(slots=8, transports=f"require:{transport}")
    client = await connect(a)
    (kept,) = await client.allocate(1, OWNER, PoolClass.GROWTH, 100.0)
    keys = [key(i) for i in range(80)]
    for i, k in enumerate(keys):
        (put,) = await client.put([(k, k)])
        assert put.stored
        assert await client.contains(keys[: i + 1]) == [False] * max(0, i - 6) + [True] * min(7, i + 1)
    assert all(p.stored for p in await client.put([(key(("batch", i)), b"x") for i in range(80)]))
    await client.release([kept])
    assert (await client.stats())["evictions"] == 160 - 7
    b = await start_agent(transports=f"require:{transport}")
    assert await (await connect(b)).get([key(("batch", 79)), key(("batch", 0))]) == [b"x", None]


async def test_c4_leaves_go_before_parents(start_agent: Start, connect: Connect, key: Key) -> None:
    client = await connect(await start_agent(slots=8))
    chains = [[key((c, i)) for i in range(4)] for c in range(2)]
    for keys in chains:
        held = await client.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)
        await client.release(await client.commit(held, b"", keys))
    for n in range(1, 5):
        await client.put([(key(("new", n)), b"x")])
        assert await client.contains(chains[0]) == [True] * (4 - n) + [False] * n
        assert await client.contains(chains[1]) == [True] * 4


async def test_c4_what_never_fits_is_refused_at_once(start_agent: Start, connect: Connect) -> None:
    client = await connect(await start_agent(slots=4))
    with pytest.raises(DoesNotFit):
        await client.allocate(5, OWNER, PoolClass.GROWTH, 60.0)


# -- stopped, hung up, killed ------------------------------------------------------------------------------


async def test_a_stopped_engine_keeps_its_slots_and_a_killed_one_loses_them(
    start_agent: Start, connect: Connect, spawn_engine: Any, key: Key
) -> None:
    a = await start_agent(slots=4)
    other, child = await connect(a), await spawn_engine(a)
    await child.tell("reserve 1 2 3")
    child.signal(signal.SIGSTOP)
    assert all(p.stored for p in await other.put([(key(i), b"x") for i in range(20)]))
    assert a.stats()["store_holds"] == 3
    with pytest.raises(PoolFull):
        await other.allocate(2, OWNER, PoolClass.GROWTH, 0.3)
    child.signal(signal.SIGKILL)
    await other.release(await other.allocate(4, OWNER, PoolClass.GROWTH, 100.0))


async def test_an_engine_that_hangs_up_but_lives_keeps_its_slots(
    start_agent: Start, connect: Connect, spawn_engine: Any
) -> None:
    a = await start_agent(slots=4)
    child = await spawn_engine(a)
    await child.tell("reserve 1 2")
    await child.tell("hangup")
    await until(lambda: a.stats()["store_connections"] == 0)
    await asyncio.sleep(0.2)
    assert (a.stats()["store_holds"], a.stats()["store_orphans"]) == (2, 2)
    child.kill()
    await until(lambda: a.stats()["store_holds"] == 0)
    assert a.stats()["store_orphans"] == 0


async def test_a_landing_of_a_dead_engine_is_fenced_and_its_slots_come_back(
    start_agent: Start, connect: Connect, spawn_engine: Any
) -> None:
    a, b = await start_agent(slots=4), await start_agent(slots=4)
    prefill, child = await connect(b), await spawn_engine(a)
    token, *slots = map(int, (await child.tell(f"landing 4 {b.ref.id} {b.ref.incarnation}"))[0].split())
    (source,) = await prefill.allocate(1, OWNER, PoolClass.PREFILL, 100.0)
    target = LandingTarget(a.ref, token, slots)
    assert await prefill.stream(target, [Run(source.slot, 0, 0, 4, 0, 16)], OWNER, 100.0)
    child.kill()
    await until(lambda: a.stats()["store_landings"] == 0, 15.0)
    await until(lambda: a.stats()["free"] == 4, 15.0)
    with pytest.raises(Fenced):
        await prefill.stream(target, [Run(source.slot, 1, 0, 4, 0, 16)], OWNER, 100.0)


async def test_a_landing_whose_writer_is_gone_is_over_within_the_drain_timeout(
    start_agent: Start, connect: Connect
) -> None:
    a = await start_agent(slots=4, drain_timeout=0.2)
    decode = await connect(a)
    landing = await decode.open_landing([], 4, 64, Ref("gone", 1), OWNER, 100.0)
    assert await decode.close_landing(landing, keep=False) == []
    assert await decode.close_landing(landing, keep=False) == []
    await until(lambda: a.stats()["free"] == 4, 15.0)
