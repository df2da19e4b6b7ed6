"""A client that attaches: whatever ends it before it is connected, nothing of it stays open, here or at the agent."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from services.store import attach as attach_module
from services.store import client as client_module
from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.sync_client import SyncStoreClient
from tests.store.conftest import NAMESPACE

Start = Callable[..., Awaitable[Agent]]
KINDS = ("socket:", "anon_inode:[pidfd]", "/memfd:")


def descriptors() -> Counter[str]:
    """Sockets, pidfds and shared memory that this process, client and agent in one, has open."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        found.update(kind for kind in KINDS if target.startswith(kind))
    return found


async def left(before: Counter[str] | None, agent: Agent) -> None:
    """Nothing is open that was not ``before``, and nobody is attached."""
    async with asyncio.timeout(100):
        while (before not in (None, descriptors())) or agent.local.connections or agent.local._ending:
            await asyncio.sleep(0.01)


async def connect(agent: Agent) -> StoreClient:
    return await StoreClient.connect(agent.settings.socket, NAMESPACE, secret="s")


@pytest.fixture
async def agent(start_agent: Start) -> Agent:
    """One that has the slab already."""
    gc.collect()  # what tests before this one have left
    agent = await start_agent()
    await (await connect(agent)).close()
    await left(None, agent)
    return agent


async def test_given_up_while_a_thread_attaches(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    attach, there, gate = attach_module.attach, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        attached = attach(*args)
        there.set()
        gate.wait(100)
        return attached

    monkeypatch.setattr(attach_module, "attach", slow)
    before = descriptors()
    connecting = asyncio.create_task(connect(agent))
    await asyncio.to_thread(there.wait, 100)
    assert descriptors() != before
    connecting.cancel()
    await asyncio.wait({connecting})
    gate.set()
    await left(before, agent)


async def test_given_up_in_the_moment_in_which_it_is_attached(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    to_thread = asyncio.to_thread

    async def lost(*args: Any) -> Any:
        await to_thread(*args)
        raise asyncio.CancelledError

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "to_thread", lost)
        connecting = asyncio.create_task(connect(agent))
        await asyncio.wait({connecting})
    assert connecting.cancelled()
    await left(before, agent)


@pytest.mark.parametrize("what", ["Mailbox", "transport", "cancelled"])
async def test_what_the_system_does_not_give_leaves_nothing(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    loop = asyncio.get_running_loop()
    create = loop.create_unix_connection

    def fails(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "no memory")

    async def gone(*args: Any, **options: Any) -> Any:
        await create(*args, **options)
        raise asyncio.CancelledError

    before = descriptors()
    with monkeypatch.context() as patch:
        if what in ("transport", "cancelled"):
            patch.setattr(loop, "create_unix_connection", fails if what == "transport" else gone)
        else:
            patch.setattr(client_module, what, fails)
        connecting = asyncio.create_task(connect(agent))
        await asyncio.wait({connecting})
    assert connecting.cancelled() or isinstance(connecting.exception(), OSError)
    await left(before, agent)


async def test_connected_and_closed_again_and_again(agent: Agent) -> None:
    before = descriptors()
    for _ in range(3):
        await (await connect(agent)).close()
        sync = await asyncio.to_thread(SyncStoreClient, agent.settings.socket, NAMESPACE, secret="s")
        await asyncio.to_thread(sync.close)
    await left(before, agent)


async def test_a_close_that_is_given_up_closes(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent does not answer its goodbye, and whoever closes has no patience; others close at the same time. What it
    held stays held at the agent, as this process lives."""
    before = descriptors()["socket:"]
    client = await connect(agent)

    async def never(*args: Any, **options: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(client._session, "ask", never)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    await client.close()
    closing.cancel()
    await asyncio.wait({closing})
    async with asyncio.timeout(100):
        while descriptors()["socket:"] != before:
            await asyncio.sleep(0.01)
    assert client._fd == -1
