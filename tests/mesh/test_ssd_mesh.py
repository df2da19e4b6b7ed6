"""A1 with the prefix on the SSD: a node's store is killed, its DRAM is gone, and the same text comes from the disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.mesh.conftest import Alone
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(400)]

Tokens = Callable[[int], list[int]]
BLOCK = 32


@pytest.fixture
def start(up: Callable[..., Mesh], tmp_path: Path) -> Iterator[Callable[..., Mesh]]:
    """``start(*flags)``: one prefill and one decode node of 2 MiB DRAM, most of it written ahead."""
    before, os.environ["MOONCAKE_SSD_AHEAD"] = os.environ.get("MOONCAKE_SSD_AHEAD"), "0.9"
    try:
        yield lambda *flags: up(
            *("--prefill", "1", "--decode", "1", "--pool-bytes", "2MiB"),
            *("--ssd-path", str(tmp_path), "--ssd-bytes", "64MiB", *flags),
        )
    finally:
        os.environ.pop("MOONCAKE_SSD_AHEAD")
        if before is not None:
            os.environ["MOONCAKE_SSD_AHEAD"] = before


async def alive(mesh: Mesh, tokens: Tokens) -> None:
    """Until it answers again."""
    async with asyncio.timeout(100):
        while (await mesh.ask(tokens(5))).status != 200:
            await asyncio.sleep(0.3)


async def until(condition: Callable[[], bool]) -> None:
    """A process that was just killed cannot be asked."""
    async with asyncio.timeout(100):
        while True:
            with contextlib.suppress(OSError):
                if await asyncio.to_thread(condition):
                    return
            await asyncio.sleep(0.2)


async def test_a1_prefix_on_ssd_after_an_agent_restart(
    start: Callable[..., Mesh], alone: Alone, tokens: Tokens
) -> None:
    ssd = start()
    prompt = tokens(8 * BLOCK + 5)
    expected = await asyncio.to_thread(alone, prompt)
    assert (await ssd.ask(prompt)).text == expected
    for _ in range(10):  # others push it out of DRAM
        await ssd.ask(tokens(8 * BLOCK))
    await until(lambda: ssd.total("mooncake_store_ssd_written_blocks_total") > 8)
    warm = await ssd.ask(prompt)
    assert (warm.text, warm.cached) == (expected, 8 * BLOCK)

    for pid in [ssd.pid("services.store", node) for node in ("node-p0", "node-d0")]:
        os.kill(pid, signal.SIGKILL)
    await alive(ssd, tokens)
    await until(lambda: ssd.total("mooncake_store_ssd_blocks") > 8)
    await ssd.indexed()
    assert ssd.total("mooncake_store_ssd_read_blocks_total") == 0

    again = await ssd.ask(prompt)
    assert (again.status, again.text, again.cached) == (200, expected, 8 * BLOCK)
    assert ssd.total("mooncake_store_ssd_read_blocks_total") >= 8
    assert ssd.total("mooncake_store_ssd_lost_blocks_total", reason="checksum") == 0
    assert await ssd.settled(within=5.0) == {}

    def told() -> bool:  # agents tell once a second
        tiers = [agent["ssd"] for agent in ssd.cluster()["agents"]]
        return [tier["state"] for tier in tiers] == ["on", "on"] and sum(tier["read"] for tier in tiers) >= 8

    await until(told)


async def test_a1_what_dram_alone_holds_outlives_the_mesh(start: Callable[..., Mesh], tokens: Tokens) -> None:
    """Written at the end of each store, read by the next: nothing was pushed out of DRAM before. The simulated engine
    looks whether each token's KV is what it wrote."""
    prompt = tokens(8 * BLOCK + 5)
    mesh = start("--engine", "simulated")
    first = await mesh.ask(prompt)
    assert (first.status, first.cached) == (200, 0)
    mesh.stop()
    mesh = start("--engine", "simulated")
    await alive(mesh, tokens)
    await until(lambda: mesh.total("mooncake_store_ssd_blocks") >= 8)
    await mesh.indexed()
    again = await mesh.ask(prompt)
    assert (again.status, again.text, again.cached) == (200, first.text, 8 * BLOCK)
    assert mesh.total("mooncake_simulated_kv_mismatches_total") == 0
    assert await mesh.settled(within=5.0) == {}
