"""Quotas on the SSD: a tenant over its own loses its own blocks there, and nobody else's; they outlive the agent."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.ssd.book import Block
from services.store.tenants import NOBODY, tag_of
from shared.telemetry import REGISTRY
from tests.store.ssd_tools import (
    NAMESPACE,
    STRIDE,
    Start,
    caught_up,
    content_of,
    items,
    key_of,
    put_slowly,
    tiers,
    until,
    written,
)

SMALL = tag_of("small")
BIG = range(100, 140)


async def client_for(agent: Agent, stack: AsyncExitStack, tenant: str) -> StoreClient:
    connecting = StoreClient.connect(agent.settings.socket, NAMESPACE, owner_name=tenant, tenant=tenant)
    return await stack.enter_async_context(await connecting)


def quotas(path: Path, dram: int, ssd: int) -> dict[str, str]:
    """In blocks."""
    path.write_text(f"small: {{dram: {dram * STRIDE}, ssd: {ssd * STRIDE}}}\n")
    return {"tenant_quotas": str(path)}


def on_ssd(agent: Agent, tenant: int) -> list[Block]:
    return [b for b in agent.ssd.book.blocks(NAMESPACE.root()) if b.tenant == tenant]


async def filled(agent: Agent, stack: AsyncExitStack) -> tuple[StoreClient, StoreClient]:
    """``big`` has 40 blocks, most of them on the SSD; then ``small`` puts as many."""
    big, small = await client_for(agent, stack, "big"), await client_for(agent, stack, "small")
    await put_slowly(agent, big, BIG)
    await written(agent, 24)
    await put_slowly(agent, small, range(40))
    return big, small


async def test_a_tenant_keeps_to_its_quota_on_the_ssd(start_ssd: Start, stack: AsyncExitStack, tmp_path: Path) -> None:
    agent = await start_ssd(**quotas(tmp_path / "q.yaml", dram=8, ssd=6), ssd_bytes=64 * STRIDE)
    big, small = await filled(agent, stack)
    theirs = [key_of(i) for i in BIG if key_of(i) in tiers(agent)]
    for at in range(40, 80):
        assert all(put.stored for put in await small.put(items([at])))
        await caught_up(agent)
        assert len(on_ssd(agent, SMALL)) <= 6
    assert len(on_ssd(agent, SMALL)) >= 3, "half of it is written ahead"
    assert all(key in tiers(agent) for key in theirs), "another's block went"
    assert await big.get(theirs[:4]) == [content_of(i) for i in BIG if key_of(i) in theirs][:4]
    mine = [i for i in range(80) if key_of(i) in tiers(agent)]
    assert mine and max(mine) == 79 and len(mine) <= 8 + 6, "its newest are there"
    for i in mine:
        assert await small.get([key_of(i)]) in ([content_of(i)], [None])

    def shown(tenant: str) -> float | None:
        return REGISTRY.get_sample_value("mooncake_store_tenant_bytes", {"tenant": tenant, "tier": "ssd"})

    await until(agent, lambda: shown("small") == len(on_ssd(agent, SMALL)) * STRIDE and (shown("other") or 0) > 0)


async def test_victims_of_one_tenant_do_not_push_each_other_out_for_ever(
    start_ssd: Start, stack: AsyncExitStack, tmp_path: Path
) -> None:
    agent = await start_ssd(**quotas(tmp_path / "q.yaml", dram=16, ssd=4))
    small = await client_for(agent, stack, "small")
    await put_slowly(agent, small, range(16))
    await caught_up(agent)
    before = agent.ssd.tally.written
    for _ in range(20):
        await caught_up(agent)
    assert agent.ssd.tally.written == before and 1 <= len(on_ssd(agent, SMALL)) <= 4


async def test_who_may_have_less_than_a_block_has_none_and_holds_up_nobody(
    start_ssd: Start, stack: AsyncExitStack, tmp_path: Path
) -> None:
    path = tmp_path / "q.yaml"
    path.write_text(f"small: {{ssd: {STRIDE - 1}}}\n")
    agent = await start_ssd(tenant_quotas=str(path), low_watermark=0.3, high_watermark=0.5)
    small, big = await client_for(agent, stack, "small"), await client_for(agent, stack, "big")
    await put_slowly(agent, small, range(16))
    slab = next(iter(agent.slabs.values()))
    await until(agent, lambda: slab.pool.slots.free >= 7)  # ahead of need, though none of it is on the SSD
    assert not on_ssd(agent, SMALL)
    await put_slowly(agent, big, BIG)
    await written(agent, 16)
    assert not on_ssd(agent, SMALL)


async def test_whose_blocks_are_is_known_to_the_next_agent_and_a_smaller_quota_holds_at_once(
    start_ssd: Start, stack: AsyncExitStack, tmp_path: Path
) -> None:
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first, **quotas(tmp_path / "q.yaml", dram=16, ssd=12))
        small, nobody = await client_for(agent, first, "small"), await client_for(agent, first, "")
        await put_slowly(agent, nobody, BIG)
        await put_slowly(agent, small, range(40))
        await until(agent, lambda: len(on_ssd(agent, SMALL)) >= 6)
        newest = on_ssd(agent, SMALL)[-3:]
        others = {b.key for b in on_ssd(agent, NOBODY)}
    heir = await start_ssd(**quotas(tmp_path / "q.yaml", dram=16, ssd=3))
    assert [b.key for b in on_ssd(heir, SMALL)] == [b.key for b in newest]
    assert {b.key for b in on_ssd(heir, NOBODY)} == others


async def test_who_brings_a_block_up_does_not_make_it_its_own(
    start_ssd: Start, stack: AsyncExitStack, tmp_path: Path
) -> None:
    """Another agent that fetches it, and an agent that was told to have a copy: it counts for whose it is."""
    flags = quotas(tmp_path / "q.yaml", dram=8, ssd=32)
    agent = await start_ssd(**flags)
    other = await start_ssd(**(flags | {"ssd_path": "", "ssd_bytes": 0}), slots=32)
    small, nobody, there = (
        await client_for(agent, stack, "small"),
        await client_for(agent, stack, ""),
        await client_for(other, stack, ""),
    )
    await put_slowly(agent, small, range(16))
    await put_slowly(agent, nobody, BIG)
    await until(agent, lambda: len(on_ssd(agent, SMALL)) >= 4)
    mine = [b.key for b in on_ssd(agent, SMALL)[:4]]
    numbers = [i for i in range(16) if key_of(i) in mine]
    assert await there.get(mine) == [content_of(i) for i in sorted(numbers, key=lambda i: mine.index(key_of(i)))]
    for one in (agent, other):
        assert one.slabs.quotas.used[SMALL] >= 4 * STRIDE


@pytest.mark.parametrize("said", [None, 5])
async def test_without_a_word_of_the_ssd_its_part_is_that_of_dram(
    start_ssd: Start, stack: AsyncExitStack, said: int | None
) -> None:
    """An eighth of 16 slots, so an eighth of 64 places."""
    blocks = 8 if said is None else said
    limit = None if said is None else said * STRIDE
    agent = await start_ssd(tenant_quota_bytes=2 * STRIDE, tenant_quota_ssd_bytes=limit, ssd_bytes=64 * STRIDE)
    acme = await client_for(agent, stack, "acme")
    for at in range(30):
        assert all(put.stored for put in await acme.put(items([at])))
        await caught_up(agent)
    found = len(on_ssd(agent, tag_of("acme")))
    assert blocks - 2 <= found <= blocks
