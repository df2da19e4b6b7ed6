"""RDMA in the guest with four Soft-RoCE devices: bytes equal, all NICs at work, what is wrong refused alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.store.transfer.base import Op, OpenGuard, Request
from services.store.transfer.rdma.metrics import NIC_BYTES
from services.store.transfer.rdma.nic import SOFT_WINDOW, UNBOUNDED
from services.store.transfer.rdma.traffic import Lane, Traffic
from tests.rdma.rig import HERE, KIB, MIB, THERE, by_rdma, in_guest, packets, pair
from tests.transfer.agents import World, codes, read, write

pytestmark = [pytest.mark.rig, in_guest, pytest.mark.timeout(300)]


def counted(nic: str, op: str) -> float:
    return float(NIC_BYTES.labels(nic, op)._value.get())


@pytest.mark.parametrize("length", [16 * KIB, 100_001, 4 * MIB, 64 * MIB])
async def test_bytes_are_equal_at_both_ends(world: World, length: int) -> None:
    a, b = await pair(world, length + 4096)
    b.pool.fill(1)
    by_rdma(await a.run([read(b.ref, 4096, 0, length)]), length)
    assert np.array_equal(a.pool.bytes[4096:], b.pool.bytes[:length])
    a.pool.fill(2)
    by_rdma(await a.run([write(b.ref, 0, 4096, length)]), length)
    assert np.array_equal(b.pool.bytes[4096:], a.pool.bytes[:length])


@pytest.mark.parametrize("block", [MIB, 4 * MIB])
async def test_blocks_larger_than_a_window_are_read_in_parts(
    world: World, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    a, b = await pair(world, 32 * MIB)
    b.pool.fill(1)
    take, flying = Traffic.take, list[int]()

    def noted(traffic: Traffic, lane: Lane, most: int, window: int = UNBOUNDED) -> Any:
        taken = take(traffic, lane, most, window)
        flying.append(lane.reading)
        return taken

    monkeypatch.setattr(Traffic, "take", noted)
    by_rdma(await a.run([read(b.ref, at, at, block) for at in range(0, 32 * MIB, block)]), 32 * MIB)
    assert np.array_equal(a.pool.bytes, b.pool.bytes)
    assert SOFT_WINDOW // 2 < max(flying) <= SOFT_WINDOW


async def test_all_nics_share_the_load(world: World) -> None:
    a, b = await pair(world, 16 * MIB)
    b.pool.fill(1)
    before = {nic: packets(nic) for nic in (*HERE, *THERE)}
    moved = {nic: counted(nic, "read") for nic in HERE}
    requests = [read(b.ref, at, at, 256 * KIB) for at in range(0, 16 * MIB, 512 * KIB)]
    by_rdma(await a.run(requests), 8 * MIB)
    assert all(packets(nic) - before[nic] > 100 for nic in (*HERE, *THERE))
    shares = [counted(nic, "read") - moved[nic] for nic in HERE]
    assert sum(shares) == 8 * MIB and min(shares) >= 2 * MIB


async def test_what_is_out_of_range_fails_alone(world: World) -> None:
    a, b = await world.agent(rdma_devices=HERE), await world.agent(rdma_devices=THERE, size=MIB)
    b.pool.fill(1)
    beyond = [read(b.ref, 0, MIB - 100, 200), write(b.ref, 0, 1 << 30, 16)]
    unknown = Request(Op.READ, "pool", 0, b.ref, "nothing", 0, 16)
    good = [read(b.ref, MIB, 0, 16 * KIB), write(b.ref, 2 * MIB, 64 * KIB, 16 * KIB)]
    results = await a.run([good[0], *beyond, unknown, good[1]])
    assert codes(results) == ["ok", "out_of_range", "out_of_range", "not_registered", "ok"]
    by_rdma([results[0], results[-1]], 32 * KIB)
    assert np.array_equal(a.pool.bytes[MIB : MIB + 16 * KIB], b.pool.bytes[: 16 * KIB])


async def test_neighbours_of_what_leaves_the_segment_are_moved(world: World) -> None:
    """Requests that follow each other travel as one; each is judged alone."""
    a, b = await world.agent(rdma_devices=HERE), await world.agent(rdma_devices=THERE, size=MIB)
    b.pool.fill(1)
    results = await a.run([read(b.ref, at, at, 256 * KIB) for at in range(0, 2 * MIB, 256 * KIB)])
    assert codes(results) == ["ok"] * 4 + ["out_of_range"] * 4
    assert np.array_equal(a.pool.bytes[:MIB], b.pool.bytes)
    assert not a.pool.bytes[MIB:].any()


async def test_a_read_only_segment_cannot_be_written(world: World) -> None:
    a, b = await pair(world, guard=OpenGuard(remote_write=False))
    results = await a.run([write(b.ref, 0, 0, 16 * KIB), read(b.ref, 0, 0, 16 * KIB)])
    assert codes(results) == ["not_permitted", "ok"]


async def test_what_the_peers_nic_refuses_fails_alone(world: World) -> None:
    """Its memory is registered no more: the keys that we know are wrong."""
    a, b = await pair(world)
    extra = bytearray(MIB)
    b.engine.register_local_memory(memoryview(extra), name="extra")
    wrong = Request(Op.READ, "pool", 0, b.ref, "extra", 0, 64 * KIB)
    b.pool.fill(1)
    by_rdma(await a.run([wrong]), 64 * KIB)
    await b.engine.unregister_local_memory("extra", 10)
    good = [read(b.ref, MIB + at, at, 64 * KIB) for at in range(0, 2 * MIB, 128 * KIB)]
    results = await a.run([*good[:8], wrong, *good[8:]])
    assert codes(results) == ["ok"] * 8 + ["not_permitted"] + ["ok"] * 8
    for request in good:
        local = a.pool.bytes[request.local_offset : request.local_offset + 64 * KIB]
        assert np.array_equal(local, b.pool.bytes[request.offset : request.offset + 64 * KIB])
    assert codes(await a.run([wrong])) == ["not_registered"]  # the keys are asked for again


async def test_a_segment_that_is_registered_anew_is_reached(world: World) -> None:
    a, b = await pair(world)
    by_rdma(await a.run([read(b.ref, 0, 0, 16 * KIB)]), 16 * KIB)
    await b.engine.unregister_local_memory("pool", 10)
    b.engine.register_local_memory(b.pool.view, name="pool")
    b.pool.fill(3)
    await a.run([read(b.ref, 0, 0, 16 * KIB)])  # may find out
    by_rdma(await a.run([read(b.ref, 0, 0, 16 * KIB)]), 16 * KIB)
    assert np.array_equal(a.pool.bytes[: 16 * KIB], b.pool.bytes[: 16 * KIB])
