"""The store's agents over RDMA, required: blocks fetched, prompts streamed into landings, fences, stale generations."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.store.transfer.base import Generations, OpenGuard
from tests.rdma.rig import HERE, KIB, MIB, PATIENCE, THERE, by_rdma, in_guest, packets, pair
from tests.store.conftest import connect, key, stack, start_agent, view
from tests.store.test_store_slice import (
    test_a_prompt_is_streamed_into_a_landing,
    test_a_writer_may_not_exceed_its_landing,
    test_blocks_written_at_one_agent_are_fetched_at_another,
)
from tests.transfer.agents import Pool, World, codes, read, write
from tests.transfer.test_transfer_fences import Landings

__all__ = [
    "connect",
    "key",
    "stack",
    "start_agent",
    "view",
    "test_a_prompt_is_streamed_into_a_landing",
    "test_a_writer_may_not_exceed_its_landing",
    "test_blocks_written_at_one_agent_are_fetched_at_another",
]

pytestmark = [pytest.mark.rig, in_guest, pytest.mark.timeout(300)]


@pytest.fixture
def transport() -> str:
    return "rdma"


@pytest.fixture(autouse=True)
def by_the_devices() -> Any:
    """The rig: the devices themselves have counted packets during the test."""
    before = sum(packets(nic) for nic in (*HERE, *THERE))
    yield
    assert sum(packets(nic) for nic in (*HERE, *THERE)) > before


async def test_a_token_that_is_not_live_is_refused(world: World) -> None:
    """Rule: token."""
    a, b = await pair(world, guard=Landings(7))
    a.pool.fill(1)
    results = await a.run(
        [write(b.ref, 0, 0, 5000, 7), write(b.ref, 0, MIB, 700_000, 8), write(b.ref, 0, 2 * MIB, 5000, 7)]
    )
    assert codes(results) == ["ok", "fenced", "ok"]
    assert np.array_equal(b.pool.bytes[:5000], a.pool.bytes[:5000])
    assert not b.pool.bytes[MIB : MIB + 700_000].any()
    a.engine.refuse_grants(b.ref, [7])
    results = await a.run([write(b.ref, 0, 0, 5000, 7), read(b.ref, 0, 0, 5000, 7)])
    assert codes(results) == ["fenced", "ok"]


async def test_destroyed_queue_pairs_receive_nothing_more(world: World) -> None:
    """Rules: own_side, handshake. What is written by a fenced landing never lands later; others' slices go again."""
    guard = Landings(7, 8)
    a, b = await pair(world, 8 * MIB, guard=guard)
    a.pool.bytes[:] = 5
    stop = asyncio.Event()

    async def stream(grant: int, at: int) -> set[str]:
        seen: set[str] = set()
        while not stop.is_set():
            seen |= set(codes(await a.run([write(b.ref, at + i * MIB, at + i * MIB, MIB, grant) for i in range(4)])))
        return seen

    fenced, other = asyncio.create_task(stream(7, 0)), asyncio.create_task(stream(8, 4 * MIB))
    async with asyncio.timeout(PATIENCE):
        while not b.pool.bytes[3 * MIB] or not b.pool.bytes[7 * MIB]:
            await asyncio.sleep(0.01)
    guard.live.remove(7)
    await b.engine.destroy_endpoints(a.ref)
    b.pool.bytes[: 4 * MIB] = 9  # the slot's next owner
    await asyncio.sleep(1)
    assert (b.pool.bytes[: 4 * MIB] == 9).all()
    stop.set()
    assert await fenced <= {"ok", "fenced"} and await other == {"ok"}
    assert codes(await a.run([write(b.ref, 0, 0, 10, 7)])) == ["fenced"]
    assert await a.engine.drained(b.ref, [7, 8], PATIENCE)


class Stale(OpenGuard):
    """A guard of a store: the generations are looked at."""


async def test_a_stale_generation_fails_the_read(world: World) -> None:
    """Rule: gen_last. The words are read by RDMA after the bytes."""
    file = Pool(8 * 64)
    words = file.view.cast("Q")
    for slot in range(64):
        words[slot] = 3
    table = Generations(file.fd, 64 * KIB)
    a, b = await pair(world, 4 * MIB, generations=table, guard=Stale())
    b.pool.fill(1)
    by_rdma(await a.run([read(b.ref, 0, 0, MIB, 3)]), MIB)
    words[5] = 4
    results = await a.run([read(b.ref, at, at, 64 * KIB, 3) for at in range(0, MIB, 64 * KIB)])
    assert codes(results) == ["ok"] * 5 + ["stale_generation"] + ["ok"] * 10
    assert codes(await a.run([read(b.ref, 0, 5 * 64 * KIB, 100, 4), read(b.ref, 0, 4 * 64 * KIB, 65 * KIB, 3)])) == [
        "ok",
        "stale_generation",
    ]
