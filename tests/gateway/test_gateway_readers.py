"""Clients that read slowly: what is kept for them, and when they are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

from services.conductor.gateway.http import Deadlines
from tests.gateway.fakes import CHAT, Api, FakeDispatcher, Script, StartApi, until

STALL = 1.0
EVENT = 200  # bytes, at least


async def endless(start: StartApi, stall: float) -> Api:
    deadlines = Deadlines(head=5, body=5, stall=stall, idle=5)
    return await start(dispatcher=FakeDispatcher(Script([5], endless=True), context=10**6), deadlines=deadlines)


@contextlib.asynccontextmanager
async def reader(api: Api) -> AsyncIterator[socket.socket]:
    """A client whose side keeps next to nothing, so that what it reads is what the server gets rid of."""
    host, _, port = api.server.url.removeprefix("http://").partition(":")
    body = json.dumps(CHAT | {"stream": True, "max_tokens": 500_000}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield sock


async def test_little_is_kept_for_a_reader_that_stopped(start: StartApi) -> None:
    api = await endless(start, 30)
    async with reader(api):
        seen: list[int] = []

        def still() -> bool:
            seen.append(api.dispatcher.produced)
            return len(seen) > 60 and seen[-1] == seen[-60] > 0

        await until(still)
        assert api.dispatcher.produced * EVENT < 2**20  # kernel, transport and queue together
    await until(lambda: api.dispatcher.open == 0)


async def test_a_slow_reader_is_not_cut_off_but_one_that_stops_is(start: StartApi) -> None:
    """More than twice the patience, but never without having read something within it."""
    api = await endless(start, STALL)
    while not await reads_slowly(api):
        await until(lambda: api.dispatcher.open == 0)


async def reads_slowly(api: Api) -> bool:
    """False: the machine kept this reader from reading in time, which says nothing."""
    loop = asyncio.get_running_loop()
    async with reader(api) as sock:
        read, punctual = loop.time(), True
        for _ in range(25):
            got = b""
            with contextlib.suppress(ConnectionError):
                got = await loop.sock_recv(sock, 2048)
            punctual = punctual and loop.time() - read < STALL / 4  # a window opens after some reads, not after each
            read = loop.time()
            assert got or not punctual
            await asyncio.sleep(STALL / 10)
        if punctual := punctual and loop.time() - read < STALL / 4:
            assert api.dispatcher.open == 1
            await until(lambda: api.dispatcher.open == 0)
        return punctual
