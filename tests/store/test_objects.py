"""Objects: what a caller that goes away in the middle leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.objects import Data, PoolBytes
from shared.engines.base import Owner, PoolClass

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
        go_on.wait(10)
        plain(self, slot, data)

    monkeypatch.setattr(PoolBytes, "write", write)
    put = asyncio.create_task(client.put([(key(1), b"some bytes")]))
    await asyncio.to_thread(begun.wait, 10)
    put.cancel()
    taken = asyncio.create_task(client.allocate(2, Owner("another"), PoolClass.GROWTH, 10.0))
    await asyncio.sleep(0.1)
    assert not put.done() and not taken.done()

    go_on.set()
    assert len(await taken) == 2
    with pytest.raises(asyncio.CancelledError):
        await put
