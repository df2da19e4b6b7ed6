"""Landings: tokens, refusals, drains, destroyed endpoints (rules of the landing model), over tcp and shm."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from services.store.transfer.base import OpenGuard
from shared.errors import Fenced, StaleGeneration
from shared.messages import Ref
from tests.transfer.agents import World, codes, read, until, write
from tests.transfer.test_transfer_engine import Gate
from tests.transfer.test_transfer_faults import through_a_wire

MIB = 1 << 20


class Landings(OpenGuard):
    """Open landings by token, with a gate in front of the bytes."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.live = set(tokens)
        self.gate = threading.Event()
        self.gate.set()
        self.writing_now = 0
        self.asked: list[tuple[int, int, int]] = []

    def writing(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        self.asked.append((offset, length, grant))
        if grant not in self.live:
            raise Fenced("no such landing")
        return self._write()

    @contextmanager
    def _write(self) -> Iterator[None]:
        self.writing_now += 1
        try:
            assert self.gate.wait(100)
            yield
        finally:
            self.writing_now -= 1

    def live_grants(self, peer: Ref) -> Sequence[int]:
        return sorted(self.live)


class Slots(OpenGuard):
    """A generation for the whole segment; the grant of a READ names it. ``on_check`` runs before each check."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1
        self.pinned = 0

    def reading(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        if grant != self.now:
            raise StaleGeneration(f"generation {self.now} is not {grant}")
        return self._pin()

    @contextmanager
    def _pin(self) -> Iterator[None]:
        self.pinned += 1
        try:
            yield
        finally:
            self.pinned -= 1


def test_the_open_guard_is_no_landing_guard() -> None:
    assert OpenGuard().live_grants(Ref("p", 1)) is None


async def test_a_token_that_is_not_live_is_refused_before_a_byte(world: World) -> None:
    """Rule: token. The refused bytes are drained; their neighbours in the same frame land."""
    guard = Landings(7)
    a, b = await world.agent(), await world.agent(guard=guard)
    a.pool[: 3 * MIB] = b"w" * (3 * MIB)
    good, bad = write(b.ref, 0, 0, 5000, 7), write(b.ref, 0, 8192, 700_000, 8)
    results = await a.engine.transfer([good, bad, write(b.ref, 0, 2 * MIB, 5000, 7)], 100)
    assert codes(results) == ["ok", "fenced", "ok"]
    assert b.pool[:5000] == b.pool[2 * MIB : 2 * MIB + 5000] == b"w" * 5000
    assert b.pool[8192 : 8192 + 700_000] == bytes(700_000)
    assert guard.writing_now == 0


async def test_the_guard_is_asked_about_exactly_what_was_requested(world: World) -> None:
    guard = Landings(7)
    a, b = await world.agent(), await world.agent(guard=guard)
    wanted = [(i * 4096, 4096, 7) for i in range(8)]
    await a.engine.transfer([write(b.ref, offset, offset, length, grant) for offset, length, grant in wanted], 100)
    assert guard.asked == wanted


async def test_a_stale_generation_fails_the_read(world: World) -> None:
    guard = Slots()
    a, b = await world.agent(), await world.agent(guard=guard)
    results = await a.engine.transfer([read(b.ref, 0, 0, 4096, 1), read(b.ref, 4096, 0, 4096, 2)], 100)
    assert codes(results) == ["ok", "stale_generation"]
    guard.now = 2
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, MIB, 1)], 100)) == ["stale_generation"]
    assert guard.pinned == 0


async def test_refused_grants_are_refused_for_good(world: World) -> None:
    """Rule: writer_refuses."""
    guard = Landings(7, 8)
    a, b = await world.agent(), await world.agent(guard=guard)
    a.engine.refuse_grants(b.ref, [7])
    for _ in range(2):
        results = await a.engine.transfer([write(b.ref, 0, 0, 10, 7), write(b.ref, 0, 0, 10, 8)], 100)
        assert codes(results) == ["fenced", "ok"]
    assert {grant for _, _, grant in guard.asked} == {8}
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 10, 7)], 100)) == ["ok"]  # a READ's grant is another thing


async def test_a_fence_drops_the_queued_and_waits_for_the_flying(world: World) -> None:
    """Rules: writer_refuses, drain_reported."""
    guard = Landings(7, 8)
    guard.gate.clear()
    a, b = await world.agent(streams=1), await world.agent(guard=guard)
    first = asyncio.create_task(a.engine.transfer([write(b.ref, 0, i * MIB, MIB, 7) for i in range(4)], 100))
    await until(lambda: guard.writing_now)
    more = [write(b.ref, 0, i * MIB, MIB, 7) for i in range(6)]
    queued = [asyncio.create_task(a.engine.transfer(more, 100)) for _ in range(6)]  # more than two frames
    other = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 5 * MIB, MIB, 8)], 100))
    await asyncio.sleep(0.05)
    a.engine.refuse_grants(b.ref, [7])
    assert not await a.engine.drained(b.ref, [7], 0.05)
    assert await a.engine.drained(b.ref, [9], 1)  # never used
    guard.gate.set()
    assert await a.engine.drained(b.ref, [7], 100)
    asked = len(guard.asked)
    assert set(codes(await first)) == {"ok"}
    outcomes = [codes(await task) for task in queued]
    assert ["fenced"] * 6 in outcomes and codes(await other) == ["ok"]
    assert {grant for _, _, grant in guard.asked[asked:]} <= {8}


async def test_destroyed_endpoints_receive_nothing_more(world: World) -> None:
    """Rules: own_side, all_paths, join_receivers: after the return no thread of ours writes for that peer."""
    guard = Landings(7)
    a, b, c = await world.agent(streams=3), await world.agent(guard=guard), await world.agent()
    a.pool[: 8 * MIB] = b"w" * (8 * MIB)
    stop = asyncio.Event()

    async def stream() -> list[str]:
        seen: list[str] = []
        while not stop.is_set():
            seen += codes(await a.engine.transfer([write(b.ref, 0, i * MIB, MIB, 7) for i in range(8)], 100))
        return seen

    streams = [asyncio.create_task(stream()) for _ in range(3)]
    others = asyncio.create_task(c.engine.transfer([read(b.ref, 0, 0, 10)] * 2, 100))
    await until(lambda: guard.writing_now)
    guard.live.clear()
    await b.engine.destroy_endpoints(a.ref)
    assert guard.writing_now == 0
    b.pool[: 8 * MIB] = bytes(8 * MIB)  # the slot's next owner
    await asyncio.sleep(0.1)
    assert b.pool[: 8 * MIB] == bytes(8 * MIB)
    assert codes(await others) == ["ok", "ok"]
    stop.set()
    seen = {code for task in streams for code in await task}
    assert seen <= {"ok", "fenced"}
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 10, 7)], 100)) == ["fenced"]
    guard.live.add(9)
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 10, 9)], 100)) == ["ok"]  # they are rebuilt
    assert await a.engine.drained(b.ref, [7], 100)


async def test_destroying_waits_for_a_receiver_that_is_at_it(world: World) -> None:
    guard = Landings(7)
    guard.gate.clear()
    a, b = await world.agent(), await world.agent(guard=guard)
    flying = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, MIB, 7)], 100))
    await until(lambda: guard.writing_now)
    destroying = asyncio.create_task(b.engine.destroy_endpoints(a.ref))
    await asyncio.sleep(0.05)
    assert not destroying.done()
    guard.live.clear()
    guard.gate.set()
    await asyncio.wait_for(destroying, 100)
    assert guard.writing_now == 0
    assert codes(await flying) == ["fenced"]


async def test_a_new_handshake_ends_what_is_not_live_any_more(world: World) -> None:
    """Rule: handshake. The retried slices of a dead landing are dropped before they are sent, for good."""
    guard = Landings(7, 8)
    guard.gate.clear()
    a, b = await world.agent(streams=1), await world.agent(guard=guard)
    tasks = [asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, 10, grant)], 100)) for grant in (7, 8)]
    await until(lambda: guard.writing_now)
    guard.live.remove(7)
    destroying = asyncio.create_task(b.engine.destroy_endpoints(a.ref))
    await asyncio.sleep(0.02)
    guard.gate.set()
    await destroying
    asked = len(guard.asked)
    assert [codes(await task) for task in tasks] == [["fenced"], ["ok"]]
    assert {grant for _, _, grant in guard.asked[asked:]} == {8}
    guard.live.add(7)
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 10, 7)], 100)) == ["fenced"]


async def test_a_grant_opened_after_the_handshake_is_usable(world: World) -> None:
    guard = Landings()
    a, b = await world.agent(), await world.agent(guard=guard)
    await a.engine.transfer([read(b.ref, 0, 0, 10)], 100)
    guard.live.add(5)
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 10, 5)], 100)) == ["ok"]


@pytest.mark.parametrize("grant", [0, 7])
async def test_a_broken_streams_write_is_not_over_until_it_was_reaped(tcp_world: World, grant: int) -> None:
    """Rule: all_completions. What a dead path had sent may still land: the writer says drained only after the
    target has let go of that path, and sends the same slice again only then."""
    guard = Landings(0, 7)
    async with through_a_wire(tcp_world) as (a, b, _):
        b.engine._server._guard = guard
        a.pool[: 4 * MIB] = b"w" * (4 * MIB)
        assert codes(await a.engine.transfer([write(b.ref, 0, 0, 8, grant)], 100)) == ["ok"]
        guard.gate.clear()
        flying = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, 4 * MIB, grant)], 0.2))
        await until(lambda: guard.writing_now)
        assert codes(await flying) == ["deadline_exceeded"]
        assert not await a.engine.drained(b.ref, [grant], 0.1)  # the target's receiver still holds the memory
        again = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, 8, grant)], 100))
        await asyncio.sleep(0.1)
        assert guard.writing_now == 1
        guard.gate.set()
        assert await a.engine.drained(b.ref, [grant], 100)
        assert codes(await again) == ["ok"]


async def test_calls_pass_while_endpoints_are_destroyed(world: World) -> None:
    async def answer(peer: Ref, payload: bytes) -> bytes:
        if payload == b"raise":
            raise StaleGeneration("as asked", field="f")
        await b.engine.destroy_endpoints(peer)
        return payload[::-1]

    a = await world.agent()
    b = await world.agent(on_call=answer)
    assert await asyncio.gather(*(a.engine.call(b.ref, bytes([i, 1]), 5) for i in range(20))) == [
        bytes([1, i]) for i in range(20)
    ]
    assert await a.engine.call(b.ref, bytes(3 * MIB), 5) == bytes(3 * MIB)
    with pytest.raises(StaleGeneration) as caught:
        await a.engine.call(b.ref, b"raise", 100)
    assert caught.value.field == "f"


async def test_gates_hold_reads_too(tcp_world: World) -> None:
    """A pinned READ holds its slot only as long as the copy runs."""
    gate = Gate()
    a, b = await tcp_world.agent(), await tcp_world.agent(guard=gate)
    flying = asyncio.create_task(a.engine.transfer([read(b.ref, 0, 0, 4096)], 100))
    await asyncio.to_thread(gate.waiting.wait, 100)
    gate.opened.set()
    assert codes(await flying) == ["ok"]
    await until(lambda: gate.inside == 0)
