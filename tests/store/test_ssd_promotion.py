"""What is on a node's SSD alone comes up for whoever asks: a landing of its own engine, a peer, on a slow disk too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from services.store.ssd.files import Files
from services.store.ssd.jobs import Return, bring
from shared.engines.base import PoolClass
from tests.store.ssd_tools import (
    OWNER,
    Start,
    begun,
    client_of,
    content_of,
    count,
    key_of,
    put_slowly,
    written,
)


async def test_a_landing_has_what_its_nodes_ssd_has(start_ssd: Start, stack: AsyncExitStack) -> None:
    agent, client = await begun(start_ssd, stack, 32)
    before = count("read_blocks_total")
    keys = [key_of(i) for i in range(4)]
    landing = await client.open_landing([*keys, key_of(99)], 6, 5 * 16 + 3, client.agent, OWNER, 100.0)
    assert landing.have == {0, 1, 2, 3} and count("read_blocks_total") - before == 4
    await client.close_landing(landing, keep=False)
    async with asyncio.timeout(100):
        while agent.stats()["store_holds"]:
            await asyncio.sleep(0.01)
    assert agent.stats()["store_prefetched"] == 0


async def test_a_landing_that_needs_the_room_goes_first(start_ssd: Start, stack: AsyncExitStack) -> None:
    """Blocks that were brought up make way for it, and then the writer sends them."""
    agent = await start_ssd(prefetch_share=1.0)
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(32))
    await written(agent, 24)
    held = await client.allocate(8, OWNER, PoolClass.PREFILL, 100.0)
    keys = [key_of(i) for i in range(12)]
    with pytest.raises(Exception, match="room"):
        await client.open_landing(keys, 12, 12 * 16, client.agent, OWNER, 0.2)
    landing = await client.open_landing(keys[:6], 8, 8 * 16, client.agent, OWNER, 100.0)
    assert len(landing.held) == 8
    await client.close_landing(landing, keep=False)
    await client.release(held)


async def test_a_peer_gets_all_of_it_however_long_the_disk_takes(
    start_ssd: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner answers with what is up in time; it is asked again for the rest."""

    def slowly(files: Files, run: Sequence[Return]) -> list[str]:
        time.sleep(0.05)
        return bring(files, run)

    agent, other = await start_ssd(), await start_ssd(ssd_path="", ssd_bytes=0, slots=64)
    client, reader = await client_of(agent, stack), await client_of(other, stack)
    await put_slowly(agent, client, range(32))
    await written(agent, 24)
    monkeypatch.setattr("services.store.ssd.reading.bring", slowly)
    monkeypatch.setattr("services.store.ssd.space.CHUNK", 1)
    monkeypatch.setattr("services.store.peer_service.PROMOTION", 0.2)
    keys = [key_of(i) for i in range(8)]
    fetched = await reader.fetch(keys, b"", [], OWNER, PoolClass.PREFILL, 100.0, chained=False)
    assert [f.error for f in fetched] == [""] * 8
    await reader.release([f.held for f in fetched if f.held])
    assert await reader.get(keys) == [content_of(i) for i in range(8)]
