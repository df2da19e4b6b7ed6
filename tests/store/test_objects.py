"""Objects: into the caller's own buffers, of any size and layout, and what a caller that goes away leaves behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.objects import Buffer, Data, PoolBytes
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from shared.errors import InvalidInput

Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


async def test_a_cancelled_put_keeps_its_slot_until_its_copy_has_ended(
    start_agent: Start, connect: Connect, key: Callable[[object], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy runs in a thread that nobody can stop: were the slot another's by then, it would get our bytes."""
    client = await connect(await start_agent(slots=2, growth_headroom=0.0))
    begun, go_on, plain = threading.Event(), threading.Event(), PoolBytes.write

    def write(self: PoolBytes, slot: int, data: Data) -> None:
        begun.set()
        go_on.wait(100)
        plain(self, slot, data)

    monkeypatch.setattr(PoolBytes, "write", write)
    monkeypatch.setattr("services.store.objects.AT_ONCE", 0)
    monkeypatch.setattr("services.store.objects.MAILBOX", 0)
    put = asyncio.create_task(client.put([(key(1), b"some bytes")]))
    await asyncio.to_thread(begun.wait, 100)
    put.cancel()
    taken = asyncio.create_task(client.allocate(2, Owner("another"), PoolClass.GROWTH, 100.0))
    await asyncio.sleep(0.1)
    assert not put.done() and not taken.done()

    go_on.set()
    assert len(await taken) == 2
    with pytest.raises(asyncio.CancelledError):
        await put


async def test_get_into_fills_buffers_and_says_which_were_too_small(
    start_agent: Start, connect: Connect, key: Callable[[object], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(await start_agent())
    values = {key(n): os.urandom(n) for n in (1, 100, 4096)}
    await client.put(list(values.items()))
    for at_once in (0, 1 << 20):  # on a thread, and here
        monkeypatch.setattr("services.store.objects.AT_ONCE", at_once)
        buffers = [bytearray(b"." * size) for size in (1, 101, 4095, 8)]
        asked = [*values, key("absent")]
        got = await client.get_into([(k, memoryview(buffer)) for k, buffer in zip(asked, buffers, strict=True)])
        assert got == [1, 100, 4096, None]
        assert buffers[0] == values[key(1)] and buffers[1] == values[key(100)] + b"."
        assert buffers[2] == b"." * 4095 and buffers[3] == b"." * 8
    assert (await client.stats())["store_holds"] == 0


async def test_get_into_fills_any_writable_buffer_and_no_other(
    start_agent: Start, connect: Connect, key: Callable[[object], bytes]
) -> None:
    client = await connect(await start_agent())
    await client.put([(key(1), b"12345678")])
    numbers = np.zeros(2, np.uint32)
    assert await client.get_into([(key(1), numbers.data)]) == [8]
    assert numbers.tobytes() == b"12345678"
    with pytest.raises(InvalidInput, match="buffer"):
        await client.get_into([(key(1), memoryview(b"12345678"))])
    assert (await client.stats())["store_holds"] == 0


async def test_a_cancelled_get_into_is_over_when_nothing_writes_into_the_buffer_any_more(
    start_agent: Start, connect: Connect, key: Callable[[object], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect(await start_agent())
    await client.put([(key(1), b"some bytes")])
    begun, go_on, plain = threading.Event(), threading.Event(), PoolBytes.read_into

    def read_into(self: PoolBytes, slot: int, length: int, into: Buffer) -> None:
        begun.set()
        go_on.wait(100)
        plain(self, slot, length, into)

    monkeypatch.setattr(PoolBytes, "read_into", read_into)
    monkeypatch.setattr("services.store.objects.AT_ONCE", 0)
    get = asyncio.create_task(client.get_into([(key(1), bytearray(10))]))
    await asyncio.to_thread(begun.wait, 100)
    get.cancel()
    done, _ = await asyncio.wait({get}, timeout=0.05)
    assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await get


async def test_objects_of_an_opaque_layout_go_from_node_to_node_whole(
    start_agent: Start, stack: AsyncExitStack, key: Callable[[object], bytes], transport: str
) -> None:
    """Only the size of such a block is known: layers and tokens say nothing about it."""
    namespace = Namespace(
        model="ab", weights="cd", tokenizer="ef", dtype="float32", layers=2, kv_heads=1, head_dim=8, block_size=16,
        layout="opaque", block_bytes=10_000,
    )  # fmt: skip
    clients = []
    for _ in range(2):
        agent = await start_agent(transports=f"require:{transport}", verify="always")
        client = await StoreClient.connect(agent.settings.socket, namespace, secret="s")
        clients.append(await stack.enter_async_context(client))
    values = {key(n): os.urandom(n) for n in (1, 5000, 10_000)}
    assert all(put.stored for put in await clients[0].put(list(values.items())))
    assert await clients[1].get(list(values)) == list(values.values())
