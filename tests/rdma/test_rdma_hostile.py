"""What goes wrong around RDMA devices, done on purpose in the guest: addresses change, peers come back, limits are hit,
queue pairs break by themselves."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from services.store.transfer.base import Op, Request
from services.store.transfer.rdma import queue_pair, regions
from services.store.transfer.rdma.messages import Connect, Connected
from services.store.transfer.rdma.verbs import LOCAL_WRITE, REMOTE_READ
from shared.errors import InvalidInput, NoTransport
from tests.rdma.rig import HERE, KIB, MIB, PATIENCE, THERE, by_rdma, in_guest, packets, pair, rdma, under_way
from tests.transfer.agents import Agent, World, codes, read, until, write

pytestmark = [pytest.mark.rig, in_guest, pytest.mark.timeout(300)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=PATIENCE)


def address(nic: int, old: str, new: str) -> None:
    """Give an interface another address; what the fabric needs to route it."""
    ip("address", "del", f"{old}/24", "dev", f"nic{nic}")
    ip("address", "add", f"{new}/24", "dev", f"nic{nic}", "noprefixroute")
    table = str(100 + nic)
    ip("route", "replace", "10.77.0.0/24", "dev", f"nic{nic}", "src", new, "table", table)
    ip("route", "replace", "local", new, "dev", f"nic{nic}", "table", table)
    ip("rule", "add", "pref", str(210 + nic), "iif", "lo", "from", new, "lookup", table)


@pytest.fixture
def readdressed() -> Iterator[Any]:
    """``readdressed(nic)`` gives it 10.77.0.(51+nic); it has its own again afterwards."""
    changed: list[int] = []

    def change(nic: int) -> None:
        changed.append(nic)
        address(nic, f"10.77.0.{nic + 1}", f"10.77.0.{51 + nic}")

    yield change
    for nic in changed:
        address(nic, f"10.77.0.{51 + nic}", f"10.77.0.{nic + 1}")


@pytest.mark.parametrize("nic", [0, 3], ids=["ours", "theirs"])
async def test_an_address_changes(world: World, readdressed: Any, nic: int) -> None:
    """The index in the table of addresses is another one, or empty: queue pairs with it carry nothing any more."""
    a, b = await pair(world, 16 * MIB)
    b.pool.fill(1)
    by_rdma(await a.run([read(b.ref, at, at, MIB) for at in range(0, 16 * MIB, MIB)]), 16 * MIB)
    readdressed(nic)
    owner, device = (a, f"rxe{nic}") if nic < 2 else (b, f"rxe{nic}")
    await until(lambda: f"10.77.0.{51 + nic}" in gids(owner)[device])
    a.pool.bytes[:] = 0
    by_rdma(await a.run([read(b.ref, at, at, MIB) for at in range(0, 16 * MIB, MIB)]), 16 * MIB)
    assert np.array_equal(a.pool.bytes, b.pool.bytes)
    before = packets(device)

    async def used_again() -> bool:
        by_rdma(await a.run([read(b.ref, at, at, MIB) for at in range(0, 4 * MIB, MIB)]), 4 * MIB)
        return packets(device) - before > 100

    async with asyncio.timeout(PATIENCE):
        while not await used_again():
            await asyncio.sleep(0.1)


def gids(agent: Agent) -> dict[str, str]:
    return {nic.name: nic.gid for nic in agent.engine.nics()}


async def test_a_peer_is_restarted_with_the_same_address(world: World) -> None:
    """The old incarnation's queue pairs, keys and addresses are of no use: nothing is read with them."""
    a, b = await pair(world)
    b.pool.bytes[:] = 1
    by_rdma(await a.run([read(b.ref, 0, 0, MIB)]), MIB)
    port = b.engine.peer().port
    await b.engine.close()
    c = await world.agent(b.ref.id, rdma_devices=THERE, port=port)
    assert c.ref.id == b.ref.id and c.ref != b.ref
    c.pool.bytes[:] = 2
    assert set(codes(await a.run([read(b.ref, 0, 0, MIB)], 20.0))) <= {"stale_incarnation", "peer_gone"}
    by_rdma(await a.run([read(c.ref, 0, 0, MIB)]), MIB)
    assert (a.pool.bytes[:MIB] == 2).all()


async def test_an_initiator_is_restarted_with_the_same_name(world: World) -> None:
    """What its last incarnation had at the target goes when the new one connects."""
    a, b = await pair(world)
    by_rdma(await a.run([read(b.ref, 0, 0, 4 * MIB)]), 4 * MIB)
    await a.engine.close()  # nobody tells the target which queue pairs are over
    assert pairs(b) > 0
    c = await world.agent(a.ref.id, rdma_devices=HERE)
    by_rdma(await c.run([read(b.ref, 0, 0, 4 * MIB)]), 4 * MIB)
    assert {peer for peer, _ in rdma(b)._target._pairs} == {c.ref}  # type: ignore[union-attr]


def pairs(agent: Agent) -> int:
    return sum(nic.pairs for nic in agent.engine.nics())


async def test_a_broken_queue_pair_is_replaced(world: World) -> None:
    """One goes into its error state by itself, in use or idle: what flies goes again, and nothing is lost."""
    a, b = await pair(world, 16 * MIB)
    b.pool.fill(1)
    everything = [read(b.ref, at, at, MIB) for at in range(0, 16 * MIB, MIB)]
    by_rdma(await a.run(everything), 16 * MIB)
    broken = break_all(a)
    assert broken
    a.pool.bytes[:] = 0
    by_rdma(await a.run(everything), 16 * MIB)
    assert np.array_equal(a.pool.bytes, b.pool.bytes)
    running = asyncio.ensure_future(a.run(everything))
    await until(lambda: 0 < under_way(a) < 12 * MIB)
    break_all(a)
    by_rdma(await running, 16 * MIB)
    assert np.array_equal(a.pool.bytes, b.pool.bytes)
    assert sum(nic.broken for nic in a.engine.nics()) > 0


def break_all(agent: Agent) -> int:
    """Queue pairs that were put into their error state, behind the transport's back."""
    found = [pair for out in rdma(agent)._outgoing.values() for pair in out.pairs.values()]
    for one in found:
        attr = one.nic.verbs.QPAttr(qp_state=6)
        one._qp.modify(attr, 1)
    return len(found)


async def test_more_memory_than_the_device_registers_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment of many small regions: slices end where regions do, and requests over many of them arrive whole."""
    monkeypatch.setattr(regions, "STEP", 64 * KIB)
    a, b = await pair(world, 8 * MIB)
    b.pool.fill(1)
    requests = [read(b.ref, at, at, 100_003) for at in range(0, 8 * MIB - 100_003, 100_003)]
    by_rdma(await a.run(requests), len(requests) * 100_003)
    end = len(requests) * 100_003
    assert np.array_equal(a.pool.bytes[:end], b.pool.bytes[:end])


async def test_memory_that_the_device_does_not_take(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more regions: transfers say so, and where another transport is allowed it is taken."""
    a, b = await pair(world)
    nic = next(iter(rdma(b)._nics.values()))

    def full(address: int, length: int, access: int) -> Any:
        raise NoTransport(f"{length} bytes cannot be registered on {nic.name}: Cannot allocate memory (ulimit -l?)")

    monkeypatch.setattr(nic, "register", full)
    extra = memoryview(bytearray(MIB))
    b.engine.register_local_memory(extra, name="extra")
    (result,) = await a.run([Request(Op.READ, "pool", 0, b.ref, "extra", 0, 100)], 20.0)
    assert result.error is not None and "cannot be registered" in result.error.message


async def test_wrong_regions_are_refused_by_the_device(world: World) -> None:
    a, _ = await pair(world)
    nic = next(iter(rdma(a)._nics.values()))
    with pytest.raises(NoTransport, match="cannot be registered"):
        nic.register(4096, MIB, LOCAL_WRITE | REMOTE_READ)  # not mapped


async def test_thousands_of_scattered_requests_in_one_go(world: World) -> None:
    """Far more than a queue pair takes at one time, of odd sizes, in no order."""
    a, b = await pair(world, 16 * MIB)
    b.pool.fill(1)
    rng = np.random.default_rng(2)
    places = rng.permutation(4096)[:1500]
    requests = [read(b.ref, int(at) * 4096, int(at) * 4096, int(rng.integers(1, 4000))) for at in places]
    results = await a.run(requests)
    by_rdma(results, sum(request.length for request in requests))
    for request in requests:
        here = slice(request.offset, request.offset + request.length)
        assert np.array_equal(a.pool.bytes[here], b.pool.bytes[here])
        assert not a.pool.bytes[request.offset + request.length : request.offset + 4096].any()


async def test_more_queue_pairs_than_the_completion_queue_has_room_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later ones do with what is left, or wait for others to go; everything arrives."""
    monkeypatch.setattr(queue_pair, "DEPTH", 24)
    a, b = await pair(world, 8 * MIB, endpoints=64)
    for nic in rdma(a)._nics.values():
        nic._room = 32
    b.pool.fill(1)
    by_rdma(await a.run([read(b.ref, at, at, 16 * KIB) for at in range(0, 8 * MIB, 32 * KIB)]), 4 * MIB)
    for nic in rdma(a)._nics.values():
        assert nic._room >= 0
    rdma(a)._outgoing[b.ref].disconnect()
    await until(lambda: all(nic._room == 32 for nic in rdma(a)._nics.values()))


async def test_a_peer_names_a_device_that_is_not_there(world: World) -> None:
    a, b = await pair(world)
    by_rdma(await a.run([read(b.ref, 0, 0, 100)]), 100)
    out = rdma(a)._outgoing[b.ref]
    side = next(iter(out.pairs.values())).side
    with pytest.raises(InvalidInput, match="no RDMA device rxe9"):
        await out.call(Connect(1 << 30, "rxe9", side), Connected)
    with pytest.raises(NoTransport, match="no address of rxe2 reaches"):
        stranger = queue_pair.Side("2001:db8::1", side.kind, 0, 1, 1, side.mtu, side.reads)
        await out.call(Connect(1 << 30, "rxe2", stranger), Connected)
    by_rdma(await a.run([write(b.ref, 0, 0, 100)]), 100)


async def test_status_names_devices_and_counts_their_bytes(world: World) -> None:
    a, b = await pair(world, 16 * MIB)
    by_rdma(await a.run([read(b.ref, at, at, MIB) for at in range(0, 16 * MIB, MIB)]), 16 * MIB)
    by_rdma(await a.run([write(b.ref, 0, 0, 2 * MIB)]), 2 * MIB)
    mine, theirs = a.engine.nics(), b.engine.nics()
    assert [nic.name for nic in mine] == list(HERE) and [nic.name for nic in theirs] == list(THERE)
    assert sum(nic.read for nic in mine) == 16 * MIB and sum(nic.written for nic in mine) == 2 * MIB
    assert not any(nic.read or nic.written for nic in theirs), "whose work requests they are"
    assert {nic.state for nic in (*mine, *theirs)} == {"active"} and not any(nic.queued for nic in mine)
    assert sum(nic.pairs for nic in mine) == sum(nic.pairs for nic in theirs) > 0
    assert [nic.gid for nic in mine] == [f"10.77.0.{i} (RoCE v2, index 1)" for i in (1, 2)]
    assert a.engine.registered() == (16 * MIB, 16 * MIB)
    await a.engine.close()


def rdma_link(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["rdma", "link", *words])


@pytest.mark.parametrize("device", ["rxe1", "rxe3"], ids=["ours", "theirs"])
async def test_a_device_is_removed_and_comes_back(world: World, device: str) -> None:
    """Its removal waits until nobody has it open, and says nothing to those who have. Whoever has keys of it has to
    know that they are of no use any more."""
    a, b = await pair(world, 16 * MIB)
    everything = [read(b.ref, at, at, MIB) for at in range(0, 16 * MIB, MIB)]
    owner = a if device in HERE else b

    def state() -> str:
        return next(nic.state for nic in owner.engine.nics() if nic.name == device)

    async def arrives(seed: int) -> None:
        b.pool.fill(seed)
        by_rdma(await a.run(everything), 16 * MIB)
        assert np.array_equal(a.pool.bytes, b.pool.bytes)

    await arrives(1)
    removing = rdma_link("delete", device)
    await until(lambda: state() == "lost")
    await arrives(2)
    assert await asyncio.to_thread(removing.wait, PATIENCE) == 0
    await arrives(3)
    assert rdma_link("add", device, "type", "rxe", "netdev", f"nic{device[3:]}").wait(PATIENCE) == 0
    await until(lambda: state() == "active")
    before = packets(device)
    async with asyncio.timeout(PATIENCE):
        while packets(device) - before < 100:
            await arrives(4)
    a.pool.fill(5)
    by_rdma(await a.run([write(b.ref, 0, 0, 16 * MIB)]), 16 * MIB)
    assert np.array_equal(a.pool.bytes, b.pool.bytes)
    assert owner.engine.registered() == (16 * MIB, 16 * MIB)


async def test_a_device_that_has_failed_is_opened_anew(world: World) -> None:
    """As after a fatal event, or one of the completion queue; with WRITEs under way."""
    a, b = await pair(world, 32 * MIB)
    a.pool.fill(1)
    everything = [write(b.ref, at, at, MIB) for at in range(0, 32 * MIB, MIB)]
    by_rdma(await a.run(everything[:4]), 4 * MIB)
    for agent, name in ((a, HERE[0]), (b, THERE[1])):
        b.pool.bytes[:] = 0
        nic = rdma(agent)._nics[name]
        running = asyncio.ensure_future(a.run(everything))
        await until(lambda: 0 < under_way(a) < 24 * MIB)
        nic.failed = True
        by_rdma(await running, 32 * MIB)
        assert np.array_equal(a.pool.bytes, b.pool.bytes)
        await until(lambda agent=agent, name=name, nic=nic: rdma(agent)._nics[name] is not nic)
        await until(lambda agent=agent: {n.state for n in agent.engine.nics()} == {"active"})
    by_rdma(await a.run(everything), 32 * MIB)
