"""An engine in another container: its process cannot be seen from the agent's, only its pidfd can."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from services.store import attach as attaching
from services.store import local_socket
from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.frames import frame
from shared.errors import Unavailable

Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel answers across process namespaces."""
    monkeypatch.setattr(local_socket, "peer_pid", lambda sock: 0)


@pytest.mark.usefixtures("unseen")
async def test_what_it_held_comes_back_when_it_is_killed_and_not_before(
    start_agent: Start, connect: Connect, spawn_engine: Any
) -> None:
    agent = await start_agent(slots=8)
    child, hung = await spawn_engine(agent), await spawn_engine(agent)
    await child.tell("reserve 1 2 3")
    await hung.tell("reserve 4 5")
    await hung.tell("hangup")
    assert (await (await connect(agent)).stats())["store_holds"] == 5, "one that lives lost its slots"
    child.kill()
    hung.kill()
    async with asyncio.timeout(100):
        while agent.stats()["store_holds"]:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("brought", ["nothing", "a file", "a socket"])
async def test_without_a_pidfd_it_is_refused(
    start_agent: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch, brought: str
) -> None:
    def send(sock: socket.socket, hello: Any) -> None:
        body = frame(msgspec.msgpack.encode(hello))
        with open(os.devnull) as file, socket.socket() as other:
            fds = {"nothing": [], "a file": [file.fileno()], "a socket": [other.fileno()]}[brought]
            socket.send_fds(sock, [body], fds)

    agent = await start_agent()
    await (await connect(agent)).close()  # the pool's own descriptor is open from now on
    monkeypatch.setattr(attaching, "_send_hello", send)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match="pidfd"):
        await connect(agent)
    monkeypatch.undo()
    async with asyncio.timeout(100):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)


async def test_more_descriptors_than_an_engine_brings_are_closed(
    start_agent: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(sock: socket.socket, hello: Any) -> None:
        body = frame(msgspec.msgpack.encode(hello))
        with open(os.devnull) as file:
            for byte in body[:-1]:
                socket.send_fds(sock, [bytes([byte])], [file.fileno()] * 3)
            sock.sendall(body[-1:])

    agent = await start_agent()
    await (await connect(agent)).close()  # the pool's own descriptor is open from now on
    monkeypatch.setattr(attaching, "_send_hello", send)
    before = len(os.listdir("/proc/self/fd"))
    client = await connect(agent)
    await client.close()
    async with asyncio.timeout(100):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)
