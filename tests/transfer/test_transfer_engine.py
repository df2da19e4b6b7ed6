"""ACCEPTANCE C7, C8: what the engine moves and what it refuses, over tcp and shm."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from services.store.transfer.base import Op, OpenGuard, Request, Status
from shared.errors import DeadlineExceeded, InvalidInput, NotRegistered, Overlap, StaleGeneration
from shared.messages import Ref
from tests.transfer.agents import SIZE, World, codes, read, request, write

MIB = 1 << 20


async def test_c7_write_then_read_equal(world: World) -> None:
    a, b = await world.agent(), await world.agent()
    for length in (1, 4095, 16 << 10, MIB + 1, 5 * MIB):
        sent = secrets.token_bytes(length)
        a.pool[:length] = sent
        [wrote] = await a.engine.transfer([write(b.ref, 0, 7, length)], 100)
        assert (wrote.status, wrote.moved, wrote.error) == (Status.COMPLETED, length, None)
        assert b.pool[7 : 7 + length] == sent
        a.pool[:length] = bytes(length)
        [got] = await a.engine.transfer([read(b.ref, 0, 7, length)], 100)
        assert (got.status, got.moved, got.transport) == (Status.COMPLETED, length, wrote.transport)
        assert a.pool[:length] == sent


async def test_c7_used_transport_is_named(world: World) -> None:
    a, b = await world.agent(), await world.agent()
    results = await a.engine.transfer([write(b.ref, 0, 0, 5), read(b.ref, 0, 0, 5)], 100)
    assert {f"require:{result.transport}" for result in results} == {world.policy}


async def test_c7_many_small_requests_in_one_batch(world: World) -> None:
    a, b = await world.agent(), await world.agent()
    size = 4096
    sent = secrets.token_bytes(600 * size)
    a.pool[: len(sent)] = sent
    order = [(7 * i) % 600 for i in range(600)]  # scattered: neighbours are not neighbours
    results = await a.engine.transfer([write(b.ref, i * size, (599 - i) * size, size) for i in order], 100)
    assert codes(results) == ["ok"] * 600
    assert all(b.pool[(599 - i) * size : (600 - i) * size] == sent[i * size : (i + 1) * size] for i in range(600))
    a.pool[: len(sent)] = bytes(len(sent))
    results = await a.engine.transfer([read(b.ref, i * size, (599 - i) * size, size) for i in order], 100)
    assert codes(results) == ["ok"] * 600
    assert a.pool[: len(sent)] == sent


async def test_c7_completed_write_is_visible_to_a_third_process(world: World) -> None:
    writer, owner = await world.agent(), await world.remote()
    reader = await world.remote()
    for turn in range(5):
        writer.pool[: 2 * MIB] = bytes([turn + 1]) * (2 * MIB)
        assert codes(await writer.engine.transfer([write(owner.ref, 0, MIB, 2 * MIB)], 100)) == ["ok"]
        peer = owner.peer
        assert peer is not None
        order = {
            "ref": [owner.ref.id, owner.ref.incarnation],
            "address": [peer.host, peer.port, peer.host_id, peer.shm],
            "requests": [["read", 0, MIB, 2 * MIB]],
        }
        assert await reader.ask("transfer", **order) == ["ok"]
        assert await reader.bytes_at(0, 2 * MIB) == bytes([turn + 1]) * (2 * MIB)


async def test_c7_many_threads_of_requests_do_not_mix(world: World) -> None:
    agents = [await world.agent() for _ in range(3)]
    for number, agent in enumerate(agents):
        agent.pool[:MIB] = bytes([number + 1]) * MIB

    async def one(i: int) -> None:
        me, other = agents[i % 3], agents[(i + 1) % 3]
        at = MIB + (i // 3) * (64 << 10)
        assert codes(await me.engine.transfer([read(other.ref, at, 0, 64 << 10)], 100)) == ["ok"]
        assert me.pool[at : at + (64 << 10)] == bytes([(i + 1) % 3 + 1]) * (64 << 10)
        assert codes(await me.engine.transfer([write(other.ref, 0, 4 * MIB + at, 64 << 10)], 100)) == ["ok"]

    await asyncio.gather(*(one(i) for i in range(48)))


@pytest.mark.parametrize("op", list(Op))
async def test_c7_wrong_requests_fail_alone(world: World, op: Op) -> None:
    a, b = await world.agent(), await world.agent()
    good = [request(op, b.ref, i * 4096, i * 4096, 4096) for i in range(3)]
    wrong = [
        request(op, b.ref, 0, SIZE - 5, 6),
        request(op, b.ref, 0, SIZE, 1),
        request(op, b.ref, 0, -1, 5),
        request(op, b.ref, 0, (1 << 64) - 3, 6),
        request(op, b.ref, 0, 1 << 63, 1 << 63),
        request(op, b.ref, 0, 0, 0),
        request(op, b.ref, 0, 0, -4),
        request(op, b.ref, SIZE - 5, 0, 6),
        request(op, b.ref, -1, 0, 6),
        request(op, b.ref, 0, 0, 6, segment="nobody's"),
        Request(op, "not mine", 0, b.ref, "pool", 0, 6),
    ]
    a.pool[: 3 * 4096] = b.pool[: 3 * 4096] = b"x" * (3 * 4096)
    before = b.pool[:]
    results = await a.engine.transfer([good[0], *wrong[:5], good[1], *wrong[5:], good[2]], 100)
    got = codes(results)
    assert [got[0], got[6], got[-1]] == ["ok"] * 3
    assert got[1:6] + got[7:-1] == ["out_of_range"] * 9 + ["not_registered"] * 2
    assert b.pool[:] == before
    assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 4096)], 100)) == ["ok"]


@pytest.mark.parametrize("op", list(Op))
async def test_c7_of_neighbours_carried_together_each_fails_alone(world: World, op: Op) -> None:
    a, b = await world.agent(), await world.agent()
    a.pool[: 6 * 4096] = b"x" * (6 * 4096)
    run = [request(op, b.ref, i * 4096, SIZE - 3 * 4096 + i * 4096, 4096) for i in range(6)]
    results = await a.engine.transfer(run, 100)
    assert codes(results) == ["ok"] * 3 + ["out_of_range"] * 3
    assert [result.moved for result in results] == [4096] * 3 + [0] * 3
    expected = (b"x" if op is Op.WRITE else bytes(1)) * (3 * 4096)
    assert b.pool[SIZE - 3 * 4096 :] == a.pool[: 3 * 4096] == expected
    assert a.pool[3 * 4096 : 6 * 4096] == b"x" * (3 * 4096)


class OddSlots(OpenGuard):
    """Refuses every other range of 4096 bytes."""

    def reading(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        if offset // 4096 % 2:
            raise StaleGeneration("an odd slot")
        if offset // 4096 == 6:
            raise ZeroDivisionError("a guard with a bug")
        return super().reading(peer, segment, offset, length, grant)

    def writing(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        return self.reading(peer, segment, offset, length, grant)


@pytest.mark.parametrize("op", list(Op))
async def test_c7_the_guard_judges_each_neighbour(world: World, op: Op) -> None:
    a, b = await world.agent(), await world.agent(guard=OddSlots())
    for pool, byte in ((a.pool, b"a"), (b.pool, b"b")):
        pool[: 8 * 4096] = byte * (8 * 4096)
    results = await a.engine.transfer([request(op, b.ref, i * 4096, i * 4096, 4096) for i in range(8)], 100)
    assert codes(results) == ["ok", "stale_generation"] * 3 + ["internal", "stale_generation"]
    if op is Op.WRITE:
        assert b.pool[: 8 * 4096] == (b"a" * 4096 + b"b" * 4096) * 3 + b"b" * 8192
    else:
        assert all(a.pool[i * 4096 : (i + 1) * 4096] == b"b" * 4096 for i in (0, 2, 4))


async def test_a_target_that_allows_no_writes_refuses_them(world: World) -> None:
    a, b = await world.agent(), await world.agent(guard=OpenGuard(remote_write=False))
    a.pool[:8] = b"whatever"
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 8), read(b.ref, 0, 0, 8)], 100)) == ["not_permitted", "ok"]
    assert b.pool[:8] == bytes(8)


async def test_the_papers_calls(world: World) -> None:
    a, b = await world.agent(), await world.agent()
    a.pool[:5] = b"hello"
    batch = a.engine.allocate_batch(3)
    a.engine.submit_transfer(batch, [write(b.ref, 0, 0, 5)])
    a.engine.submit_transfer(batch, [write(b.ref, 0, SIZE, 5)])
    async with asyncio.timeout(100):
        while a.engine.get_transfer_status(batch, 0).status in (Status.WAITING, Status.PENDING):
            with pytest.raises(InvalidInput):
                a.engine.free_batch(batch)
            await asyncio.sleep(0.001)
        while a.engine.get_transfer_status(batch, 1).status in (Status.WAITING, Status.PENDING):
            await asyncio.sleep(0.001)
    assert codes([a.engine.get_transfer_status(batch, i) for i in range(2)]) == ["ok", "out_of_range"]
    assert b.pool[:5] == b"hello"
    with pytest.raises(InvalidInput):
        a.engine.get_transfer_status(batch, 2)
    with pytest.raises(InvalidInput):
        a.engine.submit_transfer(batch, [write(b.ref, 0, 0, 5)] * 2)
    a.engine.free_batch(batch)
    with pytest.raises(InvalidInput):
        a.engine.free_batch(batch)


async def test_empty_batch(world: World) -> None:
    a = await world.agent()
    assert await a.engine.transfer([], 1) == []


async def test_an_agent_reaches_itself(world: World) -> None:
    a = await world.agent()
    a.pool[:3] = b"abc"
    assert codes(await a.engine.transfer([write(a.ref, 0, MIB, 3), read(a.ref, 2 * MIB, 0, 3)], 100)) == ["ok", "ok"]
    assert a.pool[MIB : MIB + 3] == a.pool[2 * MIB : 2 * MIB + 3] == b"abc"


# -- C8: registration ----------------------------------------------------------------------------------------


async def test_c8_overlap_refused_adjacent_allowed(tcp_world: World) -> None:
    a = await tcp_world.agent()
    memory = memoryview(bytearray(300))
    register = a.engine.register_local_memory
    register(memory[100:200], name="middle")
    for start, end in ((100, 200), (0, 101), (199, 300), (120, 130), (0, 300)):
        with pytest.raises(Overlap):
            register(memory[start:end], name="other")
    register(memory[0:100], name="before")
    register(memory[200:300], name="after")
    with pytest.raises(Overlap):
        register(memoryview(bytearray(5)), name="middle")
    with pytest.raises(InvalidInput):
        register(memoryview(b"read-only"), name="constant")
    with pytest.raises(InvalidInput):
        register(memoryview(bytearray(0)), name="empty")
    for name in ("", "x" * 256):
        with pytest.raises(InvalidInput):
            register(memoryview(bytearray(5)), name=name)


class Gate(OpenGuard):
    """Holds every access at the target until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.waiting = threading.Event()
        self.inside = 0
        self.asked: list[int] = []

    def reading(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        self.asked.append(grant)
        return self._hold()

    def writing(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        return self._hold()

    @contextmanager
    def _hold(self) -> Iterator[None]:
        self.inside += 1
        self.waiting.set()
        assert self.opened.wait(100)
        try:
            yield
        finally:
            self.inside -= 1


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("side", ["submitter", "target"])
async def test_c8_unregister_waits_for_transfers_in_flight(tcp_world: World, op: Op, side: str) -> None:
    gate = Gate()
    a, b = await tcp_world.agent(), await tcp_world.agent(guard=gate)
    a.pool[:5] = b.pool[:5] = b"hello"
    flying = asyncio.create_task(a.engine.transfer([request(op, b.ref, 0, 0, 5)], 100))
    await asyncio.to_thread(gate.waiting.wait, 100)
    engine = (a if side == "submitter" else b).engine
    with pytest.raises(DeadlineExceeded):
        await engine.unregister_local_memory("pool", 0.05)
    late = asyncio.create_task(engine.unregister_local_memory("pool", 100))
    await asyncio.sleep(0.02)
    assert not late.done()
    assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 5)], 0.2)) != ["ok"]  # no new ones
    gate.opened.set()
    assert codes(await flying) == ["ok"]
    await late
    with pytest.raises(NotRegistered):
        await engine.unregister_local_memory("pool", 100)
    assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 5)], 100)) == ["not_registered"]


async def test_c8_a_segment_registered_anew_is_the_new_memory(world: World) -> None:
    """Also where the old memory is still mapped at the reader."""
    a, b = await world.agent(), await world.agent()
    b.pool[:3] = b"old"
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 3)], 100)) == ["ok"]
    await b.engine.unregister_local_memory("pool", 100)
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 3)], 100)) != ["ok"]
    fresh = type(b.pool)()
    fresh[:3] = b"new"
    b.engine.register_local_memory(fresh.view, name="pool", fd=fresh.fd)
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 3)], 100)) == ["ok"]
    assert a.pool[:3] == b"new"
