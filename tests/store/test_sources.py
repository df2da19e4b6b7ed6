"""Blocks on the SSD come from another agent's DRAM where that is predicted to be quicker, and from the SSD else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.sources import ASKING, WORTH, Copy, Disk, elsewhere, is_worth_asking
from shared.engines.base import Owner, PoolClass
from shared.errors import PeerGone
from shared.index import DRAM, SSD
from tests.store.ssd_tools import (
    OWNER,
    Start,
    begun,
    client_of,
    content_of,
    count,
    items,
    key_of,
    tiers,
    until,
)

MIB = 1 << 20
NUMBERS = range(8)
KEYS = [key_of(i) for i in NUMBERS]

sizes = st.dictionaries(st.sampled_from(KEYS), st.integers(1, 64 * MIB), min_size=1)
places = st.builds(Copy, st.sampled_from("abc"), st.sampled_from([DRAM, SSD]), st.integers(0, 64 * MIB))
copies = st.dictionaries(st.sampled_from(KEYS), st.lists(places, max_size=3, unique_by=lambda c: c.agent))
disks = st.builds(Disk, st.floats(1e6, 1e10), st.integers(0, 64 * MIB))


@given(sizes, copies, disks, st.floats(1e6, 1e10))
def test_the_quickest_agent_is_chosen_and_only_where_it_pays(
    sizes: dict[bytes, int], copies: dict[bytes, list[Copy]], disk: Disk, link: float
) -> None:
    def seconds(agent: str) -> float:
        """By hand: what it has in DRAM over the link, behind what it sends already; the rest from the disk."""
        sent, rest, backlog = 0, 0, 0
        for key, size in sizes.items():
            theirs = [c for c in copies.get(key, ()) if c.agent == agent and c.tier == DRAM]
            sent, rest = (sent + size, rest) if theirs else (sent, rest + size)
            backlog = theirs[0].backlog if theirs else backlog
        if not sent:
            return float("inf")
        return ASKING + (backlog + sent) / link + ((disk.queued + rest) / disk.rate if rest else 0.0)

    alone = (disk.queued + sum(sizes.values())) / disk.rate
    chosen = elsewhere(sizes, copies, disk, link)
    best = min(map(seconds, "abc"))
    if chosen is None:
        assert best >= WORTH * alone
        return
    assert seconds(chosen.agent) == best < WORTH * alone
    theirs = {key for key in sizes for c in copies.get(key, ()) if c.agent == chosen.agent and c.tier == DRAM}
    assert set(chosen.keys) == theirs and is_worth_asking(sizes, disk, link)


def test_a_disk_that_was_never_measured_is_measured_first() -> None:
    everywhere = {KEYS[0]: [Copy("a")]}
    assert elsewhere({KEYS[0]: MIB}, everywhere, Disk(1e3), 0.0)
    assert not is_worth_asking({KEYS[0]: MIB}, Disk(), 1e9) and not is_worth_asking({}, Disk(1e3), 1e9)


# -- agents --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes: what is looked at is who was asked."""
    monkeypatch.setattr("services.store.local_service.PROMOTION", 100.0)
    monkeypatch.setattr("services.store.borrowing.CALL_TIMEOUT", 100.0)


def measured(agent: Agent, rate: float) -> None:
    """As if its disk had shown this many bytes per second for long."""
    for _ in range(20):
        agent.ssd.tally.read_rate.add(1 << 30, (1 << 30) / rate)


async def pair(start_ssd: Start, stack: AsyncExitStack) -> tuple[Agent, StoreClient, Agent]:
    """An agent with :data:`KEYS` on its SSD alone, its client, and another agent with the same in DRAM."""
    agent, client = await begun(start_ssd, stack, 32)
    neighbour = await start_ssd(ssd_path="", ssd_bytes=0, slots=64)
    assert all(tiers(agent)[key] == SSD for key in KEYS)
    there = await client_of(neighbour, stack)
    assert all(put.stored for put in await there.put(items(NUMBERS)))
    return agent, client, neighbour


def counted() -> tuple[float, float]:
    """Blocks (read from an SSD, that came from elsewhere instead)."""
    return count("read_blocks_total"), count("spared_blocks_total")


async def brought(client: StoreClient, before: tuple[float, float]) -> tuple[float, float]:
    """Lease all of them, look at every byte, and tell what :func:`counted` has counted."""
    held = [h for h in await client.lease(KEYS, OWNER, PoolClass.PREFETCH) if h is not None]
    assert len(held) == len(KEYS)
    read, spared = counted()
    assert await client.get(KEYS) == [content_of(i) for i in NUMBERS]
    await client.release(held)
    return read - before[0], spared - before[1]


@pytest.mark.parametrize(
    ("rate", "from_disk"), [(1e4, False), (1e12, True), (0.0, True)], ids=["slow", "quick", "never measured"]
)
async def test_a_lease_takes_the_quicker_way(
    start_ssd: Start, stack: AsyncExitStack, rate: float, from_disk: bool
) -> None:
    agent, client, _ = await pair(start_ssd, stack)
    if rate:
        measured(agent, rate)
    assert await brought(client, counted()) == ((8, 0) if from_disk else (0, 8))


async def test_what_the_other_has_on_its_ssd_alone_is_read_from_ours(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent, client, neighbour = await pair(start_ssd, stack)
    neighbour.directory.committed(b"", KEYS[:5], SSD)  # its own word for it
    measured(agent, 1e4)
    assert await brought(client, counted()) == (5, 3)


async def test_an_agent_that_has_gone_costs_no_block(
    start_ssd: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, client, _ = await pair(start_ssd, stack)
    measured(agent, 1e4)

    async def gone(id: str) -> None:
        raise PeerGone(f"no agent {id}")

    monkeypatch.setattr(agent.directory, "peer", gone)
    assert await brought(client, counted()) == (8, 0)


async def test_an_index_that_does_not_answer_holds_nobody_up(
    start_ssd: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, client, _ = await pair(start_ssd, stack)
    measured(agent, 1e6)
    asked: list[Sequence[bytes]] = []

    async def hangs(keys: Sequence[bytes]) -> list[list[Copy]]:
        asked.append(keys)
        await asyncio.sleep(1000)
        return []

    monkeypatch.setattr(agent.directory, "copies", hangs)
    assert await brought(client, counted()) == (8, 0)
    assert asked


async def test_landings_and_other_agents_get_what_the_disk_has(start_ssd: Start, stack: AsyncExitStack) -> None:
    """Whoever writes a landing sends the rest; another agent asks the third one itself."""
    agent, client, _ = await pair(start_ssd, stack)
    measured(agent, 1e4)
    before = counted()
    landing = await client.open_landing(KEYS[:4], 4, 4 * 16, client.agent, OWNER, 100.0)
    assert landing.have and counted()[1] == before[1]
    await client.close_landing(landing, keep=False)
    reader = await client_of(await start_ssd(ssd_path="", ssd_bytes=0, slots=64), stack)
    fetched = await reader.fetch(KEYS[4:], b"", [agent.ref.id], Owner("r/2"), PoolClass.PREFILL, 100.0, chained=False)
    assert [f.error for f in fetched] == [""] * 4 and counted()[1] == before[1]
    await until(agent, lambda: not agent.ssd.reads)
