"""Peers that die, stop, restart or cut the line: within the deadline, and no byte lands after it (``dest_held``)."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.store.transfer.base import Op, Peer
from shared.errors import DeadlineExceeded, PeerGone
from tests.transfer.agents import SIZE, Agent, World, codes, read, request, until, write
from tests.transfer.test_transfer_engine import Gate

MIB = 1 << 20


class Wire:
    """A TCP relay in front of an agent that can be cut, or held, after a number of bytes in one direction."""

    def __init__(self, peer: Peer) -> None:
        self._target = (peer.host, peer.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.up: int | None = None
        self.down: int | None = None
        self.cut = True
        self.cuts = 0
        self.held = threading.Event()
        self._socks: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            outer = socket.create_connection(self._target)
            self._socks += [inner, outer]
            for source, target, way in ((inner, outer, "up"), (outer, inner, "down")):
                threading.Thread(target=self._pump, args=(source, target, way), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 14):
                left = getattr(self, way)
                if left is not None and len(data) >= left:
                    target.sendall(data[:left])
                    if self.cut:
                        setattr(self, way, None)
                        self.cuts += 1
                        break
                    self.held.wait()
                    data = data[left:]
                elif left is not None:
                    setattr(self, way, left - len(data))
                target.sendall(data)
        except OSError:
            pass
        for sock in (source, target):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self.held.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in [self._listener, *self._socks]:
            sock.close()


@asynccontextmanager
async def through_a_wire(world: World) -> AsyncIterator[tuple[Agent, Agent, Wire]]:
    a, b = await world.agent(streams=1), await world.agent()
    wire = Wire(b.engine.peer())
    world.peers[b.ref.id] = Peer(b.ref, "127.0.0.1", wire.port)
    try:
        yield a, b, wire
    finally:
        wire.close()


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("after", [0, 1, 20, 300, MIB])
async def test_a_cut_connection_is_replaced_and_the_transfer_completes(tcp_world: World, op: Op, after: int) -> None:
    async with through_a_wire(tcp_world) as (a, b, wire):
        source, target = (b, a) if op is Op.READ else (a, b)
        source.pool[: 4 * MIB] = os.urandom(4 * MIB)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 8)], 100)) == ["ok"]
        setattr(wire, "down" if op is Op.READ else "up", after)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 4 * MIB)], 100)) == ["ok"]
        assert wire.cuts == 1
        assert target.pool[: 4 * MIB] == source.pool[: 4 * MIB]


async def test_a_line_that_is_cut_again_and_again_fails_within_the_deadline(tcp_world: World) -> None:
    async with through_a_wire(tcp_world) as (a, b, wire):

        async def saboteur() -> None:
            while True:
                wire.down = 100
                await asyncio.sleep(0.001)

        sabotage = asyncio.create_task(saboteur())
        try:
            assert codes(await a.engine.transfer([read(b.ref, 0, 0, MIB)], 3))[0] in ("peer_gone", "deadline_exceeded")
        finally:
            sabotage.cancel()


@pytest.mark.parametrize("op", list(Op))
async def test_no_late_byte_lands_after_the_deadline(tcp_world: World, op: Op) -> None:
    """The destination of a READ that failed is ours again: what was held up on the way never arrives in it."""
    async with through_a_wire(tcp_world) as (a, b, wire):
        b.pool[: 4 * MIB] = b"L" * (4 * MIB)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 8)], 100)) == ["ok"]
        wire.cut, wire.down, wire.up = False, MIB if op is Op.READ else 4, 8 * MIB if op is Op.READ else MIB
        began = time.monotonic()
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 4 * MIB)], 0.3)) == ["deadline_exceeded"]
        assert time.monotonic() - began < 30
        a.pool[: 4 * MIB] = b"m" * (4 * MIB)
        wire.down = wire.up = None
        wire.held.set()
        await asyncio.sleep(0.1)
        assert a.pool[: 4 * MIB] == b"m" * (4 * MIB)
        assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, 4 * MIB)], 100)) == ["ok"]  # over a new one


async def test_other_requests_survive_the_deadline_of_one(tcp_world: World) -> None:
    """Its stream is destroyed under them; they go again on another."""
    gate = Gate()
    a, b = await tcp_world.agent(streams=1), await tcp_world.agent(guard=gate)
    b.pool[:8] = b"whatever"
    hasty = asyncio.create_task(a.engine.transfer([read(b.ref, 0, 0, 8)], 0.2))
    await asyncio.to_thread(gate.waiting.wait, 100)
    patient = asyncio.create_task(a.engine.transfer([read(b.ref, 100, 0, 8), write(b.ref, 100, 200, 8)], 100))
    assert codes(await hasty) == ["deadline_exceeded"]
    gate.opened.set()
    assert codes(await patient) == ["ok", "ok"]
    assert a.pool[100:108] == b"whatever"


async def test_a_cancelled_transfer_lets_go_of_its_memory_first(tcp_world: World) -> None:
    async with through_a_wire(tcp_world) as (a, b, wire):
        b.pool[: 4 * MIB] = b"L" * (4 * MIB)
        wire.cut, wire.down = False, 2 * MIB
        task = asyncio.create_task(a.engine.transfer([read(b.ref, 0, 0, 4 * MIB)], 30))
        await until(lambda: a.pool[MIB : MIB + 1] == b"L")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        a.pool[: 4 * MIB] = b"m" * (4 * MIB)
        wire.down = None
        wire.held.set()
        await asyncio.sleep(0.1)
        assert a.pool[: 4 * MIB] == b"m" * (4 * MIB)
        await a.engine.unregister_local_memory("pool", 100)  # nothing is in flight on it


@pytest.mark.parametrize("op", list(Op))
async def test_a_killed_peer_fails_its_requests_within_the_deadline(world: World, op: Op) -> None:
    a, b = await world.agent(), await world.remote()
    assert codes(await a.engine.transfer([request(op, b.ref, 0, 0, MIB)], 100)) == ["ok"]
    stop = asyncio.Event()

    async def load(at: int) -> set[str]:
        seen: set[str] = set()
        while not stop.is_set():
            seen |= set(codes(await a.engine.transfer([request(op, b.ref, at, at, MIB)] * 4, 100)))
        return seen

    loads = [asyncio.create_task(load(i * MIB)) for i in range(3)]
    await asyncio.sleep(0.05)
    b.process.send_signal(signal.SIGKILL)
    await b.process.wait()
    stop.set()
    seen = set().union(*(await asyncio.wait_for(asyncio.gather(*loads), 100)))
    assert seen <= {"ok", "peer_gone"}
    began = time.monotonic()
    got = codes(await a.engine.transfer([request(op, b.ref, 0, 0, 8)], 100))
    assert got == ["peer_gone"] and time.monotonic() - began < 60


async def test_a_killed_peers_memory_is_unmapped(world: World) -> None:
    """Else its pool would stay allocated for as long as anybody had it mapped."""
    if world.policy != "require:shm":
        pytest.skip("nothing is mapped")
    before = pools_mapped()  # of tests before this one, where something still refers to them
    a, b = await world.agent(), await world.remote()
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, MIB)], 100)) == ["ok"]
    assert pools_mapped() == before + 1
    await b.kill()
    await until(lambda: pools_mapped() <= before)


def pools_mapped() -> int:
    gc.collect()
    return mapped(lambda line: " r--s " in line).count("memfd:pool (deleted)")


def mapped(which: Callable[[str], bool]) -> str:
    with open("/proc/self/maps") as maps:
        return "\n".join(line.split(maxsplit=5)[-1].strip().removeprefix("/") for line in maps if which(line))


async def test_a_peer_restarted_on_the_same_port_is_another_one(world: World) -> None:
    a, first = await world.agent(), await world.remote("b")
    assert codes(await a.engine.transfer([write(first.ref, 0, 0, 8)], 100)) == ["ok"]
    await first.kill()
    assert first.peer is not None
    second = await world.remote("b", port=first.peer.port)
    assert second.peer is not None and second.peer.port == first.peer.port
    results = await a.engine.transfer([read(first.ref, 0, 0, 8), write(first.ref, 0, 0, 8)], 100)
    assert set(codes(results)) <= {"stale_incarnation", "peer_gone"}
    a.pool[:8] = b"whatever"
    assert codes(await a.engine.transfer([write(second.ref, 0, 0, 8)], 100)) == ["ok"]
    assert await second.bytes_at(0, 8) == b"whatever"


async def test_a_stopped_peer_costs_its_requests_the_deadline_and_others_nothing(world: World) -> None:
    a, b, c = await world.agent(), await world.remote(), await world.agent()
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, MIB)], 100)) == ["ok"]
    b.process.send_signal(signal.SIGSTOP)
    await until(lambda: stopped(b.process.pid))
    try:
        stuck = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, MIB)], 0.5))
        assert codes(await a.engine.transfer([write(c.ref, 0, 0, MIB), read(c.ref, 0, 0, MIB)], 100)) == ["ok", "ok"]
        assert codes(await stuck) == ["deadline_exceeded"]
        with pytest.raises(DeadlineExceeded):
            await a.engine.call(b.ref, b"anyone?", 0.2)
    finally:
        b.process.send_signal(signal.SIGCONT)
    a.pool[:MIB] = b"y" * MIB
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, MIB)], 100)) == ["ok"]
    assert await b.bytes_at(0, MIB) == b"y" * MIB


def stopped(pid: int) -> bool:
    """All threads are."""
    tasks = Path(f"/proc/{pid}/task")
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir())


async def test_nobody_there(tcp_world: World) -> None:
    a = await tcp_world.agent()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ref = type(a.ref)("nobody", 3)
    tcp_world.peers["nobody"] = Peer(ref, "127.0.0.1", port)
    assert codes(await a.engine.transfer([read(ref, 0, 0, 8)], 100)) == ["peer_gone"]
    with pytest.raises(PeerGone):
        await a.engine.call(ref, b"hello", 100)
    unknown = type(a.ref)("unknown", 3)
    assert codes(await a.engine.transfer([read(unknown, 0, 0, 8)], 100)) == ["peer_gone"]


async def test_a_peer_that_accepts_and_says_nothing(tcp_world: World) -> None:
    a = await tcp_world.agent(connect_timeout=0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        ref = type(a.ref)("mute", 3)
        tcp_world.peers["mute"] = Peer(ref, "127.0.0.1", mute.getsockname()[1])
        assert codes(await a.engine.transfer([read(ref, 0, 0, 8)], 100)) == ["deadline_exceeded"]
        assert codes(await a.engine.transfer([read(ref, 0, 0, 8)], 0.1)) == ["deadline_exceeded"]


async def test_closing_fails_what_is_under_way(world: World) -> None:
    gate = Gate()
    a, b = await world.agent(), await world.agent(guard=gate)
    flying = asyncio.create_task(a.engine.transfer([write(b.ref, 0, 0, 8)] * 2, 30))
    await asyncio.to_thread(gate.waiting.wait, 100)
    closing = asyncio.create_task(a.engine.close())
    assert codes(await asyncio.wait_for(flying, 100)) == ["peer_gone"] * 2
    gate.opened.set()
    await asyncio.wait_for(closing, 100)
    assert len(a.pool.view) == SIZE
