"""What an agent shows of itself when it has ended."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from services.store.agent import TICK, run_agent
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.settings import StoreSettings
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from tests.held import held_now

NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_size=16
)


def shown() -> dict[str, float]:
    return {kind: amount for kind, amount in held_now().items() if kind.startswith("store_") and amount}


async def test_an_agent_that_has_ended_holds_nothing() -> None:
    """Also where its engine was still attached and held slots."""
    settings = StoreSettings(socket="@test-" + uuid4().hex, pool_bytes=1 << 16, metrics_port=-1)
    async with run_agent(settings, LocalDirectory(Board())):
        client = await StoreClient.connect(settings.socket, NAMESPACE)
        await client.allocate(2, Owner("request/1"), PoolClass.GROWTH, 100.0)
        async with asyncio.timeout(100):
            while shown().get("store_slots") != 2:
                await asyncio.sleep(TICK)
    assert shown() == {}
    await client.close()
