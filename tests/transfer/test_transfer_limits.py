"""What a member that is slow, silent or greedy can take of an agent, over tcp and tls: so much and no more."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from services.store.transfer.base import Op, OpenGuard
from services.store.transfer.handshake import Role, hello, initiate
from services.store.transfer.limits import Limits
from services.store.transfer.metrics import CUT_OFF, UNDER_WAY, WAITING
from services.store.transfer.sockets import receive_body, receive_header
from services.store.transfer.tls import Tls
from services.store.transfer.wire import Kind, Range, SegmentRef, pack, pack_ranges, parse_fault
from shared.errors import Contended, DeadlineExceeded, PeerGone
from shared.messages import Ref
from tests.transfer.agents import SECRET, SIZE, Agent, World, codes, read, request, until, write
from tests.transfer.test_transfer_engine import Gate

MIB = 1 << 20
ME = Ref("member", 9)


class Pins(OpenGuard):
    """Counts what transfers hold now."""

    def __init__(self) -> None:
        super().__init__()
        self.held = 0
        self.taken = 0

    def reading(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        return self._pin()

    def writing(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        return self._pin()

    @contextmanager
    def _pin(self) -> Iterator[None]:
        self.held += 1
        self.taken += 1
        try:
            yield
        finally:
            self.held -= 1


def join(world: World, agent: Agent, role: Role = Role.DATA) -> socket.socket:
    """A connection of a member that does as it likes. Blocking. Raises what the agent refuses it with."""
    peer = agent.engine.peer()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    sock.connect((peer.host, peer.port))
    if world.tls:
        sock = Tls(world.tls).initiate(sock, 100.0)
    try:
        initiate(sock, SECRET, hello(role, ME, agent.ref, 77), 100.0)
    except BaseException:
        sock.close()
        raise
    return sock


def shown() -> tuple[float, float]:
    """Transfers that wait for room, bytes under way."""
    return WAITING._value.get(), UNDER_WAY._value.get()


def frame(kind: Kind, length: int) -> bytes:
    return pack(kind, 1, pack_ranges([SegmentRef("pool")], [Range(0, 0, length, 0)]))


@pytest.mark.parametrize("op", list(Op))
async def test_a_member_that_stops_in_the_middle_of_a_frame_is_cut_off(tcp_world: World, op: Op) -> None:
    """A reader that does not read, a writer that does not write: neither holds its slots for longer than a frame may
    take, and others are served meanwhile."""
    guard, before = Pins(), CUT_OFF._value.get()
    a, b = await tcp_world.agent(), await tcp_world.agent(guard=guard, limits=Limits(frame=0.5))
    sock = await asyncio.to_thread(join, tcp_world, b)
    half = b"" if op is Op.READ else bytes(MIB)
    await asyncio.to_thread(sock.sendall, frame(Kind.READ if op is Op.READ else Kind.WRITE, SIZE) + half)
    await until(lambda: guard.taken)
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8), write(b.ref, 0, 0, 8)], 100)) == ["ok"] * 2
    await until(lambda: not guard.held)
    await until(lambda: CUT_OFF._value.get() > before)
    await b.engine.unregister_local_memory("pool", 100)
    sock.close()


async def test_an_idle_member_is_not_slow(tcp_world: World) -> None:
    a, b = await tcp_world.agent(streams=1), await tcp_world.agent()
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]
    [responder] = b.engine._server._responders
    await until(lambda: responder.busy(time.monotonic() + 1e6) == 0)


async def test_a_member_has_so_many_streams_and_no_more(tcp_world: World) -> None:
    a, b = await tcp_world.agent(), await tcp_world.agent(limits=Limits(streams=3))
    socks = [await asyncio.to_thread(join, tcp_world, b) for _ in range(3)]
    with pytest.raises(Contended, match="3 data streams"):
        await asyncio.to_thread(join, tcp_world, b)
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]  # another member
    socks.pop().close()
    await until(lambda: b.engine.connections() == 3)
    socks.append(await asyncio.to_thread(join, tcp_world, b))
    for sock in socks:
        sock.close()


async def test_so_many_connections_together_and_no_more(tcp_world: World) -> None:
    b = await tcp_world.agent(limits=Limits(connections=2))
    socks = [await asyncio.to_thread(join, tcp_world, b) for _ in range(2)]
    for role in (Role.DATA, Role.CONTROL):
        with pytest.raises(Contended, match="2 connections"):
            await asyncio.to_thread(join, tcp_world, b, role)
    for sock in socks:
        sock.close()
    a = await tcp_world.agent()
    await until(lambda: b.engine.connections() == 0)
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]


async def test_calls_beyond_the_limit_are_refused_not_queued(tcp_world: World) -> None:
    """Those that are being answered may wait for what later ones say."""
    go, asked = asyncio.Event(), 0

    async def slow(_: Ref, payload: bytes) -> bytes:
        nonlocal asked
        asked += 1
        await go.wait()
        return payload

    a, b = await tcp_world.agent(), await tcp_world.agent(on_call=slow, limits=Limits(calls=2))
    calls = [asyncio.create_task(a.engine.call(b.ref, b"x", 100)) for _ in range(2)]
    await until(lambda: asked == 2)
    with pytest.raises(Contended, match="2 calls"):
        await a.engine.call(b.ref, b"x", 100)
    go.set()
    assert await asyncio.gather(*calls) == [b"x"] * 2
    assert await a.engine.call(b.ref, b"y", 100) == b"y"


async def test_a_member_that_does_not_read_its_answers_is_not_heard(tcp_world: World) -> None:
    """Else its answers would pile up in memory."""
    asked = 0

    async def answer(_: Ref, payload: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return bytes(MIB)

    a, b = await tcp_world.agent(), await tcp_world.agent(on_call=answer)
    sock = await asyncio.to_thread(join, tcp_world, b, Role.CONTROL)
    sock.settimeout(0.5)

    def flood() -> int:
        for number in range(20_000):
            try:
                sock.sendall(pack(Kind.CALL, number, bytes(4096)))
            except TimeoutError:
                return number
        return 20_000

    sent = await asyncio.to_thread(flood)
    assert asked <= sent < 20_000  # it was stopped, with a socket's worth of calls and answers under way
    assert asked < 200
    assert await a.engine.call(b.ref, b"x", 100) == bytes(MIB)
    sock.close()
    await until(lambda: b.engine.connections() == 1)


async def test_a_refusal_of_a_member_arrives(tcp_world: World) -> None:
    """What a limit says travels over the control stream too."""
    b = await tcp_world.agent(limits=Limits(calls=0))
    sock = await asyncio.to_thread(join, tcp_world, b, Role.CONTROL)

    def ask() -> bytes:
        sock.sendall(pack(Kind.CALL, 5, b"x"))
        return receive_body(sock, receive_header(sock))

    assert isinstance(parse_fault(await asyncio.to_thread(ask)), Contended)
    sock.close()


# -- the submitter's queue -----------------------------------------------------------------------------------------


async def test_transfers_wait_for_room_in_the_queue_of_their_peer(world: World) -> None:
    """In order; others' peers are not waited for."""
    gate = Gate()
    a, b = await world.agent(limits=Limits(queued=3000)), await world.agent(guard=gate)
    c = await world.agent()
    done: list[int] = []
    waiting, under_way = shown()

    async def one(number: int, length: int) -> None:
        assert codes(await a.engine.transfer([write(b.ref, 0, 0, length)], 100)) == ["ok"]
        done.append(number)

    tasks = [asyncio.create_task(one(number, length)) for number, length in enumerate((2000, 1000, 2500, 100))]
    await asyncio.to_thread(gate.waiting.wait, 100)
    await until(lambda: shown() == (waiting + 2, under_way + 3000))
    assert codes(await a.engine.transfer([write(c.ref, 0, 0, 3000)], 100)) == ["ok"]
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 1)], 0.05)) == ["deadline_exceeded"]
    gate.opened.set()
    await asyncio.gather(*tasks)
    assert sorted(done[:2]) == [0, 1] and sorted(done[2:]) == [2, 3]
    assert shown() == (waiting, under_way)
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 1 << 16)], 100)) == ["ok"]  # larger than all room: alone


async def test_what_is_submitted_beyond_the_queue_is_contended(world: World) -> None:
    gate = Gate()
    a, b = await world.agent(limits=Limits(queued=3000)), await world.agent(guard=gate)
    batch, before = a.engine.allocate_batch(3), shown()
    a.engine.submit_transfer(batch, [write(b.ref, 0, 0, 2000)])
    with pytest.raises(Contended) as error:
        a.engine.submit_transfer(batch, [write(b.ref, 0, 0, 2000)])
    assert error.value.field == "data_queue_bytes" and "3000 bytes" in error.value.message
    a.engine.submit_transfer(batch, [write(b.ref, 0, 0, 1000)])
    gate.opened.set()
    await until(lambda: shown() == before)
    a.engine.submit_transfer(batch, [write(b.ref, 0, 0, 2000)])
    await until(lambda: shown() == before)
    a.engine.free_batch(batch)


async def test_who_gives_up_waiting_leaves_the_queue(tcp_world: World) -> None:
    gate = Gate()
    a, b = await tcp_world.agent(limits=Limits(queued=10)), await tcp_world.agent(guard=gate)
    before = shown()
    flying = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, 10)], 100))
    await asyncio.to_thread(gate.waiting.wait, 100)
    waiting = [asyncio.create_task(a.engine.transfer([read(b.ref, 0, 0, 10)], 100)) for _ in range(3)]
    await until(lambda: shown()[0] == before[0] + 3)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    gate.opened.set()
    assert codes(await flying) == codes(await waiting[1]) == codes(await waiting[2]) == ["ok"]
    assert shown() == before


# -- several streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", list(Op))
async def test_a_stream_that_is_stopped_in_the_middle_leaves_its_slices_to_others(tcp_world: World, op: Op) -> None:
    """One of three is cut off by the target again and again, whatever it carries then."""
    a, b = await tcp_world.agent(streams=3), await tcp_world.agent()
    source, target = (b, a) if op is Op.READ else (a, b)
    source.pool[:SIZE] = bytes(range(256)) * (SIZE // 256)
    moves = [request(op, b.ref, at, at, 2 * MIB) for at in range(0, SIZE, 2 * MIB)]
    for _ in range(4):
        target.pool[:SIZE] = bytes(SIZE)
        flying = asyncio.create_task(a.engine.transfer(moves * 4, 100))
        await asyncio.sleep(0)
        for responder in list(b.engine._server._responders)[:1]:
            responder.destroy()
        assert codes(await flying) == ["ok"] * 16
        assert target.pool[:SIZE] == source.pool[:SIZE]
    assert a.engine.connections() >= 1


async def test_a_peer_without_room_for_a_stream_says_so(tcp_world: World) -> None:
    a, b = await tcp_world.agent(), await tcp_world.agent(limits=Limits(connections=0))
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["contended"]
    with pytest.raises(Contended):
        await a.engine.call(b.ref, b"x", 100)


async def test_a_peer_that_is_not_heard_of_again(tcp_world: World) -> None:
    """Half open: it took the connection and is gone without a word."""
    a = await tcp_world.agent()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        b = await tcp_world.agent()
        peer = b.engine.peer()
        tcp_world.peers[b.ref.id] = type(peer)(b.ref, "127.0.0.1", gone.getsockname()[1])
        assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 0.3)) == ["deadline_exceeded"]
        with pytest.raises((DeadlineExceeded, PeerGone)):
            await a.engine.call(b.ref, b"x", 0.3)
        tcp_world.peers[b.ref.id] = peer
    async with asyncio.timeout(100):
        while codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) != ["ok"]:
            pass  # what waited for the dead connection fails with it
