"""A TCP relay to Redis that a test can cut: a network partition of whoever connects through it."""

from __future__ import annotations

import asyncio
from typing import Self
from urllib.parse import urlsplit

from shared.tasks import end


class Relay:
    """``url`` leads to ``target`` (a Redis URL) until :meth:`cut`; :meth:`mend` lets connections through again."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._cut = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._target.path}"

    async def cut(self) -> None:
        self._cut = True
        await end(*self._tasks)

    def mend(self) -> None:
        self._cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            theirs, to_them = await asyncio.open_connection(self._target.hostname, self._target.port)
            try:
                await asyncio.gather(_pump(reader, to_them), _pump(theirs, writer))
            finally:
                to_them.transport.abort()
        except OSError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError
