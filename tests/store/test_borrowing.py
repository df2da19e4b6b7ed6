"""Leases of other agents' blocks: given back with the next call, in a moment, and when that call fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from services.store import peer_messages as peer
from services.store.agent import Agent
from services.store.borrowing import MAX_TTL
from services.store.client import StoreClient
from shared.engines.base import Owner, PoolClass
from shared.errors import DeadlineExceeded, MooncakeError, PeerGone, ProtocolError

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]
Calls = Callable[..., Awaitable[bytes]]


async def never_sent(call: Calls, *args: Any) -> bytes:
    raise PeerGone("gone")


async def answer_lost(call: Calls, *args: Any) -> bytes:
    await call(*args)
    raise DeadlineExceeded("late")


async def cancelled(call: Calls, *args: Any) -> bytes:
    await call(*args)
    raise asyncio.CancelledError


async def garbled(call: Calls, *args: Any) -> bytes:
    return (await call(*args))[:-1]


async def no_such_time(call: Calls, *args: Any) -> bytes:
    leased: peer.Leased = peer.decode_answer(await call(*args), peer.Leased)
    return peer.encode(peer.Leased(leased.id, MAX_TTL + 1, leased.blocks))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("fails", [never_sent, answer_lost, cancelled, garbled, no_such_time])
async def test_leases_that_were_to_go_back_with_a_call_that_fails_go_back(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    a = await start_agent(transports="require:tcp", lease_ttl=8.0)
    b = await start_agent(transports="require:tcp", carry_bytes=0)
    here, there = await connect(a), await connect(b)
    await here.put([(key(0), b"x"), (key(1), b"y")])
    borrower, slab = b._fetcher._reader._borrower, next(iter(b.slabs.values()))
    with monkeypatch.context() as patch:
        patch.setattr("services.store.borrowing.LINGER", 1000.0)
        assert await there.get([key(0)]) == [b"x"]
    assert a.stats()["store_leases"] == 1
    call, asked = b.engine.call, key(1) if fails is no_such_time else key("absent")
    with monkeypatch.context() as patch:
        patch.setattr(b.engine, "call", lambda *args: fails(call, *args))
        with pytest.raises((MooncakeError, ProtocolError, asyncio.CancelledError)):
            await borrower.lease(slab, a.ref, asked, 0, 100.0)
    await until(lambda: not a.stats()["store_leases"])
    assert await there.get([key(1)]) == [b"y"]


@pytest.mark.parametrize("carry", [0, 10_000])
async def test_a_reader_without_room_gives_back_what_it_was_leased(
    start_agent: Start, connect: Connect, key: Key, carry: int
) -> None:
    a = await start_agent(transports="require:tcp")
    b = await start_agent(slots=2, transports="require:tcp", carry_bytes=carry)
    here, there = await connect(a), await connect(b)
    await here.put([(key(i), b"x" * 100) for i in range(4)])
    full = await there.allocate(2, Owner("request/1"), PoolClass.GROWTH, 100.0)
    assert await there.get([key(i) for i in range(4)], timeout=0.1) == [None] * 4
    await until(lambda: not a.stats()["store_leases"])
    assert (await there.stats())["store_holds"] == 2
    await there.release(full)
    assert await there.get([key(0)]) == [b"x" * 100]


@pytest.mark.parametrize("command", ["fetch", "reserve", "allocate", "wait", "landing"])
async def test_a_client_that_is_killed_in_the_middle_of_a_call_leaves_nothing_held(
    start_agent: Start, connect: Connect, spawn_engine: Any, key: Key, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    a, b = await start_agent(), await start_agent(carry_bytes=0)
    here, there = await connect(a), await connect(b)
    await here.put([(b"child-0000000000", b"x")])
    owner, gate, asked = Owner("request/1"), asyncio.Event(), asyncio.Event()
    read = b._fetcher._reader.read

    async def slow(*args: Any) -> Any:
        asked.set()
        await gate.wait()
        return await read(*args)

    monkeypatch.setattr(b._fetcher._reader, "read", slow)
    async with AsyncExitStack() as held:
        if command == "wait":
            blocking = await there.reserve([b"child-0000000000"], owner, PoolClass.PREFILL, 100.0)
        elif command != "fetch":
            blocking = await there.allocate(16, owner, PoolClass.GROWTH, 100.0)
        else:
            blocking = []
        held.push_async_callback(there.release, blocking)
        child = await spawn_engine(b)
        child.say(f"{command} 0" if command != "landing" else "landing 1")
        await until(lambda: any(c.tasks for c in b.local.connections))
        if command == "fetch":
            await asked.wait()
        child.kill()
        await until(lambda: b.stats()["store_connections"] == 1 and not b.stats()["store_orphans"])
    gate.set()
    kinds = ("holds", "slots", "leases", "landings", "quarantined", "fetches", "waiting", "prefetched")
    await until(lambda: not any(agent.stats()[f"store_{kind}"] for agent in (a, b) for kind in kinds))
    assert command != "fetch" or await there.contains([b"child-0000000000"]) == [True], "what it asked for is cached"
