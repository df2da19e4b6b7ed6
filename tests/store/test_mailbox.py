"""Few bytes put in one round trip: the same results as the long way, whatever else happens meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store import local_messages as wire
from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.mailbox import SIZE, Mailbox, mailbox_file
from shared.engines.base import Owner, PoolClass
from shared.errors import DeadlineExceeded, InvalidInput, PoolFull

OWNER = Owner("request/1")

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


def requests(client: StoreClient) -> int:
    """Sent so far that are answered."""
    return client._session._next


async def test_a_small_put_and_a_get_are_one_request_each_and_hold_nothing(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    agent = await start_agent(slots=64)
    client = await connect(agent)
    before = requests(client)
    results = await client.put([(key(0), b"x" * 5000), (key(1), memoryview(b"yes")), (key(0), b"z")])
    assert [(r.stored, r.error) for r in results[:2]] == [(True, None)] * 2
    assert (results[2].stored, results[2].error) == (False, None)
    assert [r.stored for r in await client.put([(key(2), bytearray(b"y"))])] == [True]
    sent = requests(client)
    assert await client.get([key(0), key(1), key(2)]) == [b"x" * 5000, b"yes", b"y"]
    assert requests(client) == sent + 1
    while agent.stats()["store_holds"]:  # without a word from the client
        await asyncio.sleep(0.001)
    assert sent - before <= 4, "the key that came twice took the long way"


async def test_puts_at_the_same_time_do_not_disturb_each_other(start_agent: Start, connect: Connect, key: Key) -> None:
    client = await connect(await start_agent(slots=64))
    items = [(key(i), bytes([i]) * (1000 + i)) for i in range(40)]
    results = await asyncio.gather(*(client.put([item]) for item in items))
    assert all(result.stored for (result,) in results)
    assert await client.get([k for k, _ in items]) == [data for _, data in items]


async def test_a_put_that_is_given_up_leaves_the_mailbox_to_the_next(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    client = await connect(await start_agent())
    given_up = asyncio.create_task(client.put([(key(0), b"a" * 100)]))
    await asyncio.sleep(0)
    given_up.cancel()
    results = await asyncio.gather(given_up, client.put([(key(1), b"b" * 100)]), return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert await client.get([key(1)]) == [b"b" * 100]
    assert await client.get([key(0)]) in ([None], [b"a" * 100])
    assert not client._posting
    assert [r.stored for r in await client.put([(key(2), b"c")])] == [True]


async def test_who_writes_the_key_already_and_a_full_pool_are_waited_for(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    agent = await start_agent(slots=2)
    writer, client = await connect(agent), await connect(agent)
    held = await writer.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)
    waiting = asyncio.create_task(client.put([(key(0), b"mine")]))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await writer.release(held)  # aborted: ours goes ahead
    assert [r.stored for r in await waiting] == [True]
    assert await writer.get([key(0)]) == [b"mine"]

    full = await writer.allocate(2, OWNER, PoolClass.PREFILL, 100.0)
    (refused,) = await client.put([(key(1), b"x")], timeout=0.05)
    assert isinstance(refused.error, PoolFull)
    waiting = asyncio.create_task(client.put([(key(1), b"x")]))
    await writer.release(full)
    assert [r.stored for r in await waiting] == [True]


def refused(c: Any, r: Any) -> list[wire.Posted]:
    raise InvalidInput("no")


def broken(c: Any, r: Any) -> list[wire.Posted]:
    raise ZeroDivisionError


@pytest.mark.parametrize("answer", [None, refused, broken])
@pytest.mark.parametrize("asker", ["waits", "is gone", "is late"])
async def test_however_a_put_ends_the_mailbox_is_free_once_it_is_answered(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch, answer: Any, asker: str
) -> None:
    agent = await start_agent()
    client = await connect(agent)
    handlers, session, kept = agent.local._handlers, client._session, list[bytes]()
    with monkeypatch.context() as patch:
        patch.setattr("services.store.session.GRACE", 0.0)
        patch.setitem(handlers, wire.Put, answer or handlers[wire.Put])
        patch.setattr(session, "data_received", kept.append)
        timeout = 0.0 if asker == "is late" else 100.0
        putting = asyncio.create_task(client.put([(key(0), b"a" * 100)], timeout))
        while not kept:
            await asyncio.sleep(0)
        if asker == "is gone":
            putting.cancel()
        if asker != "waits":
            (ended,) = await asyncio.gather(putting, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError) or isinstance(ended[0].error, DeadlineExceeded)  # type: ignore[index]
            assert client._posting, "the agent may be reading"
    for data in kept:
        session.data_received(data)
    await asyncio.wait({putting})
    sent = requests(client)
    assert [r.stored for r in await client.put([(key(1), b"b")])] == [True]
    assert requests(client) == sent + 1 and await client.get([key(1)]) == [b"b"]


async def test_an_agent_that_answers_nothing_costs_a_put_its_time_once(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each batch of its items."""
    grace = 0.2
    monkeypatch.setattr("services.store.session.GRACE", grace)
    monkeypatch.setattr("services.store.objects.GRACE", grace)
    agent = await start_agent(slots=16)
    client = await connect(agent)
    await client.put([(key("made before"), b"x")])
    agent.local._handlers[wire.Put] = lambda c, r: asyncio.Event().wait()
    sent = requests(client)
    results = await client.put([(key(i), b"x") for i in range(200)], timeout=0.0)
    assert len(results) == 200 and all(isinstance(r.error, DeadlineExceeded) for r in results)
    assert requests(client) == sent + 1


def put_of(keys: bytes, lengths: list[int], by: wire.By) -> Callable[[int], wire.Put]:
    return lambda id: wire.Put(id, keys, lengths, by)


async def test_lengths_that_are_wrong_are_refused_and_the_connection_lives(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    client = await connect(await start_agent())
    by, size = wire.By("o", 0.0, 4), client.pool.geometry.slot_bytes
    one, most = key(0), SIZE // size + 1
    wrong: list[tuple[list[int], bytes]] = [
        ([1], one + key(1)),
        ([0], one),
        ([-1], one),
        ([size + 1], one),
        ([1], b"short"),
        ([], one),
        ([size] * most, b"".join(key(i) for i in range(most))),
    ]
    for lengths, keys in wrong:
        with pytest.raises(InvalidInput):
            await client._session.ask(put_of(keys, lengths, by), Any)
    assert await client.contains([key(0)]) == [False]
    assert (await client.stats())["store_holds"] == 0


@given(st.lists(st.binary(min_size=1, max_size=SIZE // 4), max_size=4))
def test_what_was_written_is_read_at_the_other_end(values: list[bytes]) -> None:
    fd = mailbox_file()
    ours, theirs = Mailbox(fd), Mailbox(fd)
    ours.write([memoryview(value) for value in values])
    assert [bytes(value) for value in theirs.values(list(map(len, values)))] == values
    os.close(fd)
