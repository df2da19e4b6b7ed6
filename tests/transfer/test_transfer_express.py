"""Small transfers that are carried where they are asked for: alone, handed over at any point, and under every fault."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.transfer import engine as engine_module
from services.store.transfer import stream as stream_module
from services.store.transfer.base import Op, Request
from services.store.transfer.batches import Batch, Slice
from services.store.transfer.flight import Answer, Frame
from services.store.transfer.segments import Segment
from services.store.transfer.stream import Stream
from services.store.transfer.turn import TURN, Turn
from services.store.transfer.wire import Kind, SegmentRef, pack, pack_errors
from shared.errors import MooncakeError, OutOfRange, ProtocolError
from shared.messages import Ref
from tests.transfer.agents import SIZE, Agent, World, codes, read, request, until, write
from tests.transfer.test_transfer_engine import Gate
from tests.transfer.test_transfer_faults import through_a_wire
from tests.transfer.test_transfer_fences import Landings

KIB, MIB = 1 << 10, 1 << 20


class Carried:
    """How the frames went that were carried on the loop."""

    def __init__(self) -> None:
        self.whole = 0
        self.handed_over = 0


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Carried:
    counts, carry = Carried(), Stream.carry

    def counting(self: Stream, pieces: list[Slice]) -> bool:
        done = carry(self, pieces)
        counts.whole += done
        counts.handed_over += not done
        return done

    monkeypatch.setattr(Stream, "carry", counting)
    return counts


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for answers whatever the load of the machine."""
    monkeypatch.setattr(stream_module, "WAIT", 100_000)
    monkeypatch.setattr(stream_module, "Turn", partial(Turn, 100.0))


@pytest.fixture(params=["patient", "hasty"])
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Frames end on the loop; or each is handed over before its answer."""
    if request.param == "patient":
        request.getfixturevalue("patient")
    else:
        monkeypatch.setattr(stream_module, "WAIT", 0)
        monkeypatch.setattr("services.store.transfer.patience.MOST", 0)
    yield request.param


async def met(world: World, **options: Any) -> tuple[Agent, Agent]:
    """Two agents with a stream that rests."""
    a, b = await world.agent(streams=1), await world.agent(**options)
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 8)], 100)) == ["ok"]
    link = a.engine._dispatch.peers.get(b.ref).link
    await until(lambda: link.resting)
    return a, b


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("op", list(Op))
async def test_small_transfers_wake_no_thread(plain_world: World, carried: Carried, op: Op) -> None:
    a, b = await met(plain_world)
    source, target = (b, a) if op is Op.READ else (a, b)
    mapped = op is Op.READ and plain_world.policy == "require:shm"
    for size, count in ((1, 1), (4096, 1), (MIB, 1), (4 * MIB, 1), (16 * KIB, 64), (4 * KIB, 100)):
        source.pool[: size * count] = os.urandom(size * count)
        moves = [request(op, b.ref, at, at, size) for at in range(0, size * count, size)]
        before = carried.whole
        results = await a.engine.transfer(moves, 100)
        assert codes(results) == ["ok"] * count and all(result.moved == size for result in results)
        assert target.pool[: size * count] == source.pool[: size * count]
        assert carried.whole == before + (not mapped)
    assert carried.handed_over == 0


async def test_scattered_requests_go_in_one_frame(plain_world: World, carried: Carried, patience: str) -> None:
    a, b = await met(plain_world)
    b.pool[:SIZE] = os.urandom(SIZE)
    places = [at * 8 * KIB for at in range(100)]
    moves = [read(b.ref, at, SIZE - 8 * KIB - at, 3000) for at in places]
    assert codes(await a.engine.transfer(moves, 100)) == ["ok"] * 100
    for at in places:
        there = SIZE - 8 * KIB - at
        assert a.pool[at : at + 3000] == b.pool[there : there + 3000]
    if plain_world.policy == "require:tcp":
        assert carried.whole + carried.handed_over == 1
        assert carried.whole or patience == "hasty"  # an answer may be there without any wait


@pytest.mark.usefixtures("patience")
async def test_what_is_refused_fails_alone(plain_world: World) -> None:
    guard = Landings(0, 7)
    a, b = await met(plain_world, guard=guard)
    a.pool[:100] = b"w" * 100
    moves = [write(b.ref, 0, 0, 10, 7), write(b.ref, 20, 20, 10, 8), write(b.ref, 40, 40, 10, 7)]
    assert codes(await a.engine.transfer(moves, 100)) == ["ok", "fenced", "ok"]
    assert b.pool[:50] == b"w" * 10 + bytes(30) + b"w" * 10
    assert codes(await a.engine.transfer([write(b.ref, 0, SIZE - 5, 10, 7)], 100)) == ["out_of_range"]
    assert codes(await a.engine.transfer([write(b.ref, SIZE - 5, 0, 10, 7)], 100)) == ["out_of_range"]
    a.engine.refuse_grants(b.ref, [7])  # rule: writer_refuses
    asked = len(guard.asked)
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 10, 7)], 100)) == ["fenced"]
    assert len(guard.asked) == asked and await a.engine.drained(b.ref, [7, 8], 100)
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]


async def test_what_takes_long_is_left_to_the_thread_and_is_under_way(plain_world: World, carried: Carried) -> None:
    """Fences, drains and deadlines know of it from then on."""
    guard = Landings(0, 7)
    a, b = await met(plain_world, guard=guard)
    guard.gate.clear()
    flying = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, 8, 7)], 100))
    await until(lambda: guard.writing_now)
    assert not await a.engine.drained(b.ref, [7], 0.05)
    late = await a.engine.transfer([write(b.ref, 0, 0, 8, 7)], 0.05)
    assert codes(late) == ["deadline_exceeded"]
    guard.gate.set()
    assert codes(await flying) == ["ok"]
    assert await a.engine.drained(b.ref, [7], 100)
    assert carried.handed_over >= 1
    await a.engine.unregister_local_memory("pool", 100)


@pytest.mark.parametrize("kind", [Op.READ, Op.WRITE])
async def test_a_deadline_and_a_cancellation_after_it_was_handed_over(tcp_world: World, kind: Op) -> None:
    gate = Gate()
    a, b = await tcp_world.agent(streams=1), await tcp_world.agent()
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 8)], 100)) == ["ok"]
    b.engine._server._guard = gate
    for responder in list(b.engine._server._responders):
        responder._guard = gate
    assert codes(await a.engine.transfer([request(kind, b.ref, 0, 0, 8)], 0.2)) == ["deadline_exceeded"]
    task = asyncio.create_task(a.engine.transfer([request(kind, b.ref, 0, 0, 8)], 100))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.opened.set()
    await a.engine.unregister_local_memory("pool", 100)  # nothing touches it any more


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("after", [0, 1, 15, 16, 20, 60, 300_000])
async def test_a_frame_is_handed_over_at_any_byte(tcp_world: World, op: Op, after: int) -> None:
    """The line stops in the middle of head, header or payload for a while; the thread goes on there."""
    async with through_a_wire(tcp_world) as (a, b, wire):
        source, target = (b, a) if op is Op.READ else (a, b)
        source.pool[:MIB] = os.urandom(MIB)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 8)], 100)) == ["ok"]
        link = a.engine._dispatch.peers.get(b.ref).link
        await until(lambda: link.resting)
        wire.cut = False
        setattr(wire, "down" if op is Op.READ or after < 16 else "up", after)
        flying = asyncio.create_task(a.engine.transfer([request(op, b.ref, 0, 0, MIB)], 100))
        await asyncio.sleep(0.02)
        wire.down = wire.up = None
        wire.held.set()
        assert codes(await flying) == ["ok"]
        assert target.pool[:MIB] == source.pool[:MIB]
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, MIB)], 100)) == ["ok"]


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("after", [0, 10, 300_000])
async def test_a_line_cut_under_a_carried_frame(tcp_world: World, op: Op, after: int) -> None:
    async with through_a_wire(tcp_world) as (a, b, wire):
        source, target = (b, a) if op is Op.READ else (a, b)
        source.pool[:MIB] = os.urandom(MIB)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 8)], 100)) == ["ok"]
        setattr(wire, "down" if op is Op.READ else "up", after)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, MIB)], 100)) == ["ok"]
        assert wire.cuts == 1 and target.pool[:MIB] == source.pool[:MIB]


@pytest.mark.usefixtures("patience")
async def test_endpoints_destroyed_again_and_again(plain_world: World) -> None:
    """The target severs what rests: whoever finds that out goes on over a new stream."""
    a, b = await met(plain_world)
    b.pool[:8] = b"whatever"
    for _ in range(20):
        await b.engine.destroy_endpoints(a.ref)
        assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8), write(b.ref, 0, 8, 8)], 100)) == ["ok", "ok"]
        assert b.pool[8:16] == b"whatever"


@pytest.mark.usefixtures("patience")
async def test_many_at_a_time(plain_world: World) -> None:
    """Large ones that are asked for together do not go one after the other."""
    a, b = await met(plain_world)
    b.pool[:SIZE] = os.urandom(SIZE)

    async def one(number: int) -> None:
        size = (100, 5000, MIB, 2 * MIB)[number % 4]
        for _ in range(3):
            assert codes(await a.engine.transfer([read(b.ref, at := number % 4 * 2 * MIB, at, size)], 100)) == ["ok"]

    await asyncio.gather(*(one(number) for number in range(24)))
    for number, size in enumerate((100, 5000, MIB, 2 * MIB)):
        at = number * 2 * MIB
        assert a.pool[at : at + size] == b.pool[at : at + size]


@pytest.mark.usefixtures("patient")
async def test_who_asks_again_and_again_leaves_others_their_turn(
    plain_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SHARE", 0.0)
    a, b = await met(plain_world)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    for _ in range(50):
        assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]
    task.cancel()
    assert turns >= 49


@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("op", list(Op))
async def test_a_turn_that_is_over_hands_the_frame_over_wherever_it_is(
    tcp_world: World, carried: Carried, monkeypatch: pytest.MonkeyPatch, op: Op, part: float
) -> None:
    """Each look at the clock takes ``part`` of a turn."""
    now = itertools.count()
    monkeypatch.setattr(stream_module, "Turn", lambda: Turn(clock=lambda: next(now) * part * TURN))
    monkeypatch.setattr("services.store.transfer.patience.MOST", 0)
    a, b = await met(tcp_world)
    source, target = (b, a) if op is Op.READ else (a, b)
    for size in (8, MIB, 4 * MIB):
        source.pool[:size] = os.urandom(size)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, size)], 100)) == ["ok"]
        assert target.pool[:size] == source.pool[:size]
    assert not carried.whole or part < 1.0


# -- answers, in pieces --------------------------------------------------------------------------------------------


def frame_of(kind: Kind, sizes: list[int]) -> tuple[Frame, bytearray]:
    memory = bytearray(sum(sizes))
    local = Segment("pool", memoryview(memory), "cpu:0")
    batch, slices, at = Batch(0, len(sizes), lambda job: None), [], 0
    for size in sizes:
        job = batch.add(Request(Op.READ, "pool", at, Ref("p", 1), "s", 0, size), local)
        slices.append(Slice(job, kind, 0, size, SegmentRef("s")))
        at += size
    return Frame(5, kind, slices), memory


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 16), st.sets(st.integers(0, 4)))
def test_an_answer_is_received_from_any_point_on(sizes: list[int], ahead: int, bad: set[int]) -> None:
    frame, memory = frame_of(Kind.READ, sizes)
    refused: dict[int, MooncakeError] = {number: OutOfRange("no") for number in bad if number < len(sizes)}
    data = bytes(range(1, 1 + sum(size for number, size in enumerate(sizes) if number not in refused)))
    sent = pack(Kind.DONE, 5, pack_errors(refused)) + data
    answer = Answer(frame).after_head(memoryview(sent)[:ahead])
    at = ahead
    while answer.wanted:
        for buffer in answer.wanted:
            buffer[:] = sent[at : at + len(buffer)]
            at += len(buffer)
        answer.filled()
    assert at == len(sent) and set(answer.refused) == set(refused)
    expected, left = b"", data
    for number, size in enumerate(sizes):
        part = bytes(size) if number in refused else left[:size]
        left = left if number in refused else left[size:]
        expected += part
    assert memory == expected


def test_an_answer_to_something_else_is_none() -> None:
    for sent in (pack(Kind.DONE, 6), pack(Kind.READ, 5)):
        answer = Answer(frame_of(Kind.WRITE, [3])[0]).after_head(memoryview(sent))
        with pytest.raises(ProtocolError):
            answer.filled()
