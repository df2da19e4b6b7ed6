"""This project's store: agents of two nodes as processes, and a client on the first. What is verified: everything.

``argv[1]``: the transport between the nodes. Redis, where the block index is, counts among the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from uuid import uuid4

import numpy as np

from benchmarks.peers.keeper import LIVE, Buffers, Keeper
from benchmarks.peers.lines import Answer, answer, die_with_parent, own_stdout
from services.store.client import StoreClient
from shared.blocks import Namespace
from shared.embedded import RedisServer

SIZES = (128 << 10, 1 << 20, 4 << 20, 16 << 20)
SLAB = 2 * LIVE
TIMEOUT = 30.0
TRIES, SETTLE = 100, 0.1


def namespace(size: int) -> Namespace:
    return Namespace(
        model="benchmark",
        weights="",
        tokenizer="",
        dtype="float32",
        layers=1,
        kv_heads=1,
        head_dim=1,
        block_size=16,
        layout="bytes",
        block_bytes=size,
    )


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:16]


class Near(Keeper):
    """Values at the client's own node. ``clients`` by the size of their values."""

    def __init__(self, buffers: Buffers, pids: list[int], clients: dict[int, StoreClient]) -> None:
        super().__init__(buffers, pids)
        self.clients = clients

    async def put(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        await put(self.clients[size], keys, [self.source[at : at + size].data for at in places])

    async def get(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        into = [(key_of(key), self.sink[at : at + size].data) for key, at in zip(keys, places, strict=True)]
        lengths = await self.clients[size].get_into(into, TIMEOUT)
        if any(length != size for length in lengths):
            raise RuntimeError("a value is missing")

    async def remove(self, keys: Sequence[str], size: int) -> None:
        await self.clients[size].remove([key_of(key) for key in keys], TIMEOUT)


class NearBytes(Near):
    """The same, but gets return ``bytes``."""

    _kept = b""

    async def get(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        values = await self.clients[size].get([key_of(key) for key in keys], TIMEOUT)
        if any(value is None for value in values):
            raise RuntimeError("a value is missing")
        self._kept = values[-1] or b""

    def show(self, place: int, size: int) -> None:
        self.sink[place : place + size] = np.frombuffer(self._kept, np.uint8)


class Far(Near):
    """Values at the other node, put there by a client of its own; the first get brings them over, checked."""

    once = True

    def __init__(self, near: Near, buffers: Buffers, others: dict[int, StoreClient]) -> None:
        super().__init__(buffers, near.pids, near.clients)
        self._others = others

    async def fill(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        probe = "probe " + uuid4().hex
        at = [*places, places[0]]
        await put(self._others[size], [*keys, probe], [self.source[k : k + size].data for k in at])
        for _ in range(TRIES):  # the index follows within milliseconds
            if (await self.clients[size].get([key_of(probe)], TIMEOUT))[0] is not None:
                break
            await asyncio.sleep(SETTLE)
        await asyncio.sleep(SETTLE)


async def put(client: StoreClient, keys: Sequence[str], values: Sequence[memoryview]) -> None:
    items = [(key_of(key), value) for key, value in zip(keys, values, strict=True)]
    for result in await client.put(items, TIMEOUT):
        if not result.stored:
            raise RuntimeError(f"a value was not stored: {result.error}")


@contextlib.contextmanager
def agent(redis: str, mesh: str, transport: str) -> Iterator[tuple[str, int]]:
    """Socket and pid of an agent."""
    socket = "@benchmark-" + uuid4().hex
    flags = {
        "redis": redis,
        "mesh": mesh,
        "socket": socket,
        "pool-bytes": len(SIZES) * SLAB,
        "slab-bytes": SLAB,
        "transports": f"require:{transport}",
        "verify": "always",
        "metrics-port": -1,
        "log-level": "warning",
    }
    argv = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "services.store", *argv]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=die_with_parent) as child:
        try:
            yield socket, child.pid
        finally:
            child.terminate()


@contextlib.asynccontextmanager
async def attached(socket: str) -> AsyncIterator[dict[int, StoreClient]]:
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for size in SIZES:
            client = await StoreClient.connect(socket, namespace(size), owner_name="benchmark", timeout=60.0)
            clients[size] = await stack.enter_async_context(client)
        yield clients


async def serve(transport: str) -> None:
    lines, mesh = own_stdout(), "m" + uuid4().hex[:8]
    with RedisServer() as redis, agent(redis.url, mesh, transport) as one, agent(redis.url, mesh, transport) as two:
        async with attached(one[0]) as here, attached(two[0]) as there:
            buffers = Buffers()
            near = Near(buffers, [os.getpid(), one[1], two[1], redis.process.pid], here)
            keepers = {"near": near, "bytes": NearBytes(buffers, near.pids, here), "far": Far(near, buffers, there)}

            async def handle(request: Answer) -> Answer:
                return await keepers[request["who"]].handle(request)

            await answer(handle, lines, {"pids": near.pids})


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
