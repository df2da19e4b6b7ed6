"""Checksums: jobs of a fair size, one for each commit; what was fetched keeps its owner's and none is computed anew."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.agent import Agent
from services.store.checksums import TOGETHER, checksum, jobs
from services.store.client import StoreClient
from services.store.peer_messages import Descriptor
from services.store.reader import Copy, Wanted, runs
from shared.engines.base import Held, Kind

Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


@given(st.lists(st.integers(1, 3 * TOGETHER)))
def test_jobs_keep_the_order_and_end_as_soon_as_they_are_worth_a_thread(sizes: list[int]) -> None:
    blocks = [(slot, 7, size) for slot, size in enumerate(sizes)]
    made = list(jobs(blocks))
    assert [block for job in made for block in job] == blocks
    for job in made[:-1]:
        assert sum(size for _, _, size in job) >= TOGETHER > sum(size for _, _, size in job[:-1])
    assert all(made)


def copy(key: bytes, parent: bytes) -> Copy:
    return Copy(Wanted(key, parent), Descriptor(0, 1, 1, 1, 1), Held(1, 0, Kind.NEW, key))


@given(st.lists(st.booleans(), max_size=8), st.sampled_from([b"", b"root"]))
def test_what_is_committed_together_follows_each_other_or_has_one_parent(links: list[bool], root: bytes) -> None:
    copies: list[Copy] = []
    for number, linked in enumerate(links):
        copies.append(copy(b"%d" % number, copies[-1].wanted.key if linked and copies else root))
    made = list(runs(copies))
    assert [c for run, _ in made for c in run] == copies and all(run for run, _ in made)
    for run, chained in made:
        keys, parents = [c.wanted.key for c in run], [c.wanted.parent for c in run]
        assert parents[1:] == (keys[:-1] if chained else [parents[0]] * (len(run) - 1))
    if links and not any(links):
        assert len(made) == 1
    if all(links):
        assert len(made) <= 1


async def test_a_batch_of_objects_has_its_checksums_and_no_object_follows_another(
    start_agent: Start, connect: Connect, key: Callable[[object], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.checksums.TOGETHER", 5000)
    agent = await start_agent()
    client = await connect(agent)
    values = {key(n): os.urandom(3000 + n) for n in range(7)}
    assert all(put.stored for put in await client.put(list(values.items())))
    (slab,) = agent.slabs.values()
    slots = {k: slab.pool.find(k) for k in values}
    await slab.checksums.ready([slot for slot in slots.values() if slot is not None])
    for k, slot in slots.items():
        assert slot is not None
        found = slab.pool.slots[slot]
        assert found.checksum == checksum(memoryview(values[k])) and found.parent == b""
    assert len(slab.checksums) == 0
    assert await client.remove([next(iter(values))]) == [True]  # nobody's parent: it goes alone


async def test_a_fetched_copy_keeps_its_owner_s_checksum_and_none_is_computed(
    start_agent: Start,
    connect: Connect,
    key: Callable[[object], bytes],
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = [await start_agent(transports=f"require:{transport}", verify="always") for _ in range(2)]
    owner, reader = await connect(a), await connect(b)
    values = {key(n): os.urandom(100 + n) for n in range(5)}
    await owner.put(list(values.items()))
    (slab,) = b.slabs.values()

    started: list[int] = []
    monkeypatch.setattr(slab.checksums, "start", started.extend)
    assert await reader.get(list(values)) == list(values.values())
    for k, value in values.items():
        slot = slab.pool.find(k)
        assert slot is not None and slab.pool.slots[slot].checksum == checksum(memoryview(value))
    assert not started
