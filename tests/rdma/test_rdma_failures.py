"""Cables pulled and plugged in the RDMA guest: transfers finish over what is left, or fail in time."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from tests.rdma.rig import KIB, MIB, by_rdma, cable, in_guest, packets, pair, rdma, under_way
from tests.transfer.agents import World, codes, read, until
from tests.transfer.agents import write as written

pytestmark = [pytest.mark.rig, in_guest, pytest.mark.timeout(300), pytest.mark.usefixtures("cables")]


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("pulled", [0, 3], ids=["ours", "theirs"])
async def test_a_cable_is_pulled_in_the_middle(world: World, op: str, pulled: int) -> None:
    a, b = await pair(world, 64 * MIB)
    (b if op == "read" else a).pool.fill(1)
    make = read if op == "read" else written
    requests = [make(b.ref, at, at, MIB) for at in range(0, 64 * MIB, MIB)]
    by_rdma(await a.run(requests[:4]), 4 * MIB)
    running = asyncio.ensure_future(a.run(requests))
    await until(lambda: 0 < under_way(a) < 56 * MIB)
    cable("unplug", pulled)
    results = await running
    by_rdma(results, 64 * MIB)
    assert np.array_equal(a.pool.bytes, b.pool.bytes)
    cable("plug", pulled)
    (b if op == "read" else a).pool.fill(2)
    before = packets(f"rxe{pulled}")

    async def used_again() -> bool:
        by_rdma(await a.run(requests[:8]), 8 * MIB)
        return packets(f"rxe{pulled}") - before > 100

    async with asyncio.timeout(100):
        while not await used_again():
            await asyncio.sleep(0.1)
    await until(lambda: not any(nic.reset for agent in (a, b) for nic in rdma(agent)._nics.values()))


async def test_all_cables_are_pulled(world: World) -> None:
    """An error within the deadline; when they are back, all goes on."""
    a, b = await pair(world, 16 * MIB)
    by_rdma(await a.run([read(b.ref, 0, 0, MIB)]), MIB)
    for number in range(4):
        cable("unplug", number)
    began = time.monotonic()
    results = await a.run([read(b.ref, at, at, MIB) for at in range(0, 16 * MIB, MIB)], timeout=3)
    assert set(codes(results)) <= {"deadline_exceeded", "peer_gone"} and time.monotonic() - began < 30
    for number in range(4):
        cable("plug", number)
    b.pool.fill(4)
    by_rdma(await a.run([read(b.ref, 0, 0, 16 * MIB)]), 16 * MIB)
    assert np.array_equal(a.pool.bytes, b.pool.bytes)


async def test_given_up_transfers_touch_nothing_any_more(world: World) -> None:
    """Rule: dest_held."""
    a, b = await pair(world, 64 * MIB)
    b.pool.bytes[:] = 7
    by_rdma(await a.run([read(b.ref, 0, 0, 16 * KIB)]), 16 * KIB)
    results = await a.run([read(b.ref, at, at, MIB) for at in range(0, 64 * MIB, MIB)], timeout=0.05)
    assert "deadline_exceeded" in codes(results)
    a.pool.bytes[:] = 9
    by_rdma(await a.run([read(b.ref, 0, 0, 16 * KIB)]), 16 * KIB)
    assert (a.pool.bytes[16 * KIB :] == 9).all()
    assert under_way(a) == 0


async def test_a_peer_that_is_gone_fails_its_requests(world: World) -> None:
    a, b = await pair(world, 64 * MIB)
    by_rdma(await a.run([read(b.ref, 0, 0, MIB)]), MIB)
    running = asyncio.ensure_future(a.run([read(b.ref, at, at, MIB) for at in range(0, 64 * MIB, MIB)], timeout=60))
    await until(lambda: 0 < under_way(a) < 60 * MIB)
    await b.engine.close()
    assert set(codes(await running)) & {"peer_gone", "deadline_exceeded", "not_permitted"}
