"""Blocks for tests of the SSD tier, and waiting for its disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.directory import LocalDirectory
from services.store.memory import stride_of
from shared.blocks import Namespace
from shared.engines.base import Owner
from shared.telemetry import REGISTRY

NAMESPACE = Namespace(
    model="ab", weights="cd", tokenizer="ef", dtype="float32", layers=4, kv_heads=2, head_dim=16, block_size=16
)
SLOT, STRIDE = NAMESPACE.geometry.slot_bytes, stride_of(NAMESPACE.geometry)
OWNER = Owner("request/1")
Start = Callable[..., Awaitable[Agent]]


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"mooncake_store_ssd_{name}", labels) or 0.0


def key_of(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(SLOT - number % 3)


def items(numbers: Sequence[int]) -> list[tuple[bytes, bytes]]:
    return [(key_of(i), content_of(i)) for i in numbers]


async def client_of(agent: Agent, stack: AsyncExitStack, namespace: Namespace = NAMESPACE) -> StoreClient:
    return await stack.enter_async_context(await StoreClient.connect(agent.settings.socket, namespace))


async def written(agent: Agent, blocks: int) -> None:
    """Wait until so many blocks are on the SSD, and nothing is on its way there."""
    await until(agent, lambda: len(agent.ssd.book) >= blocks and not agent.ssd.writes)


async def until(agent: Agent, condition: Callable[[], bool]) -> None:
    """Wait for something that the agent does by itself."""
    async with asyncio.timeout(100):
        while not condition():
            agent.ssd.look()
            await asyncio.sleep(0.01)


async def put_slowly(agent: Agent, client: StoreClient, numbers: Sequence[int]) -> None:
    """Four at a time, so that the disk keeps up."""
    for at in range(0, len(numbers), 4):
        assert all(put.stored for put in await client.put(items(numbers[at : at + 4])))
        await caught_up(agent)


async def caught_up(agent: Agent) -> None:
    """What can go to the SSD now is there: a block goes once it has its checksum, and removals are in the log."""
    await until(agent, lambda: not any(len(slab.checksums) for slab in agent.slabs.values()))
    await until(agent, lambda: not agent.ssd.busy)
    agent.ssd.look()
    await until(agent, lambda: not agent.ssd.busy)


async def begun(start_ssd: Start, stack: AsyncExitStack, blocks: int = 40) -> tuple[Agent, StoreClient]:
    """An agent of 16 slots with so many blocks, all but the newest 8 on its SSD, and a client of it."""
    agent = await start_ssd()
    client = await client_of(agent, stack)
    await put_slowly(agent, client, range(blocks))
    await written(agent, blocks - 8)
    return agent, client


def tiers(agent: Agent) -> dict[bytes, int]:
    directory = agent.directory
    assert isinstance(directory, LocalDirectory)
    return directory.tiers


async def filled(start_ssd: Start) -> list[int]:
    """A folder of an agent that has ended. Returns which blocks it holds."""
    async with AsyncExitStack() as first:
        agent = await start_ssd(on=first)
        await put_slowly(agent, await client_of(agent, first), range(40))
        await written(agent, 32)
        return [i for i in range(40) if agent.ssd.book.find(NAMESPACE.root(), key_of(i))]


async def what_is_left(agent: Agent, stack: AsyncExitStack, numbers: Sequence[int]) -> list[int]:
    """Asserts that nothing comes back wrong, and that the index knows what does not."""
    client, left = await client_of(agent, stack), []
    for i in numbers:
        (data,) = await client.get([key_of(i)])
        assert data in (content_of(i), None)
        assert (key_of(i) in tiers(agent)) == (data is not None)
        left += [] if data is None else [i]
    return left
