"""ACCEPTANCE C10: more peers than the endpoint pool's cap; and what is shown in the metrics."""

from __future__ import annotations

import asyncio

from services.store.transfer.metrics import BYTES, IN_FLIGHT
from tests.transfer.agents import World, codes, read, until, world_of, write
from tests.transfer.test_transfer_engine import Gate


async def test_c10_more_peers_than_the_cap_are_all_served(tcp_world: World) -> None:
    a = await tcp_world.agent(endpoints=3, streams=1)
    peers = [await tcp_world.agent() for _ in range(8)]
    for _ in range(3):
        for peer in peers:
            assert codes(await a.engine.transfer([write(peer.ref, 0, 0, 100)], 100)) == ["ok"]
        results = await asyncio.gather(*(a.engine.transfer([read(p.ref, 0, 0, 100)] * 3, 100) for p in peers))
        assert [codes(result) for result in results] == [["ok"] * 3] * 8
    await until(lambda: a.engine.connections() <= 3)  # none is leaked, at either end
    await until(lambda: sum(peer.engine.connections() for peer in peers) <= 3)


async def test_c10_active_endpoints_are_not_evicted(tcp_world: World) -> None:
    gate = Gate()
    a = await tcp_world.agent(endpoints=2, streams=1)
    slow, *others = [await tcp_world.agent(guard=gate), *[await tcp_world.agent() for _ in range(4)]]
    flying = asyncio.create_task(a.engine.transfer([read(slow.ref, 0, 0, 100)], 100))
    await asyncio.to_thread(gate.waiting.wait, 100)
    for _ in range(2):
        for peer in others:
            assert codes(await a.engine.transfer([write(peer.ref, 0, 0, 100)], 100)) == ["ok"]
    gate.opened.set()
    assert codes(await flying) == ["ok"]
    assert len(gate.asked) == 1  # on its first connection, not again on another


async def test_c10_all_endpoints_busy_means_waiting_within_the_deadline(tcp_world: World) -> None:
    gate = Gate()
    a = await tcp_world.agent(endpoints=1)
    slow, other = await tcp_world.agent(guard=gate), await tcp_world.agent()
    flying = asyncio.create_task(a.engine.transfer([read(slow.ref, 0, 0, 100)], 100))
    await asyncio.to_thread(gate.waiting.wait, 100)
    assert codes(await a.engine.transfer([read(other.ref, 0, 0, 100)], 0.1)) == ["deadline_exceeded"]
    waiting = asyncio.create_task(a.engine.transfer([read(other.ref, 0, 0, 100)], 100))
    await asyncio.sleep(0.05)
    gate.opened.set()
    assert codes(await flying) == codes(await waiting) == ["ok"]


async def test_the_second_choice_is_shown() -> None:
    """prefer: the next transport is taken and named; require: NoTransport."""
    async with world_of("prefer:shm,tcp") as world:
        a, shared, private = await world.agent(), await world.agent(), await world.agent(share=False)
        used = [(await a.engine.transfer([read(p.ref, 0, 0, 9)], 100))[0].transport for p in (shared, private)]
        assert used == ["shm", "tcp"]
        assert codes(await private.engine.transfer([write(a.ref, 0, 0, 9)], 100)) == ["ok"]
        strict = await world.agent(policy="require:shm")
        assert codes(await strict.engine.transfer([read(private.ref, 0, 0, 9)], 100)) == ["no_transport"]
        elsewhere = await world.agent(host_id="")
        assert codes(await strict.engine.transfer([write(elsewhere.ref, 0, 0, 9)], 100)) == ["no_transport"]
        [result] = await a.engine.transfer([write(elsewhere.ref, 0, 0, 9)], 100)
        assert (result.error, result.transport) == (None, "tcp")


async def test_a_target_that_cannot_map_the_writer_gets_the_bytes_over_tcp() -> None:
    async with world_of("prefer:shm,tcp") as world:
        a, b = await world.agent(), await world.agent()
        a.engine._local.shm = "@nobody-listens-here"  # as from another namespace
        a.pool[:5] = b"hello"
        for _ in range(2):
            [result] = await a.engine.transfer([write(b.ref, 0, 0, 5)], 100)
            assert (result.error, result.transport) == (None, "tcp")
        assert b.pool[:5] == b"hello"


async def test_bytes_are_counted_by_transport_and_op(world: World) -> None:
    a, b = await world.agent(), await world.agent()
    transport = world.policy.removeprefix("require:")
    counters = {op: BYTES.labels(transport, op) for op in ("read", "write")}
    before = {op: counter._value.get() for op, counter in counters.items()}
    await a.engine.transfer([write(b.ref, 0, 0, 1000), write(b.ref, 0, -1, 77), read(b.ref, 0, 0, 300)], 100)
    moved = {op: counter._value.get() - before[op] for op, counter in counters.items()}
    assert moved == {"write": 1000, "read": 300}
    assert IN_FLIGHT.value == 0
