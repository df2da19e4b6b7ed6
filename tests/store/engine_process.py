"""A store client in a process of its own, obeying lines on stdin: ``reserve N ...``, ``fetch N ...``, ``wait N``,
``allocate N``, ``fill N``, ``commit``, ``landing N``, ``hangup``. Keys are named by numbers."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import numpy as np

from services.store.client import StoreClient
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass, PoolMap
from shared.messages import Ref


async def serve(address: str, namespace: Namespace) -> None:
    client: Any = await StoreClient.connect(address, namespace, owner_name="child", secret="s")
    client.kept = []
    print("ready", flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        await obey(client, *line)
        print("done", flush=True)


async def obey(client: Any, command: str, *arguments: str) -> None:
    owner = Owner("child/1")
    keys = [f"child-{int(i):010d}".encode()[:16] for i in arguments if i.isdecimal()]
    if command == "reserve":
        client.kept += await client.reserve(keys, owner, PoolClass.PREFILL, 100.0)
    elif command == "fetch":
        await client.fetch(keys, b"", [], owner, PoolClass.CACHE, 100.0, chained=False)
    elif command == "wait":
        await client.wait(keys[0], owner, 100.0)
    elif command == "allocate":
        await client.allocate(1, owner, PoolClass.PREFILL, 100.0)
    elif command == "fill":
        fill(client.pool, [h.slot for h in client.kept], int(arguments[0]))
    elif command == "commit":
        await client.commit(client.kept, b"", [h.key for h in client.kept])
    elif command == "landing":
        n = int(arguments[0])
        writer = Ref(arguments[1], int(arguments[2])) if len(arguments) > 2 else Ref("nobody", 1)
        landing = await client.open_landing([], n, n * client.pool.geometry.block_size, writer, owner, 100.0)
        print(landing.token, *[h.slot for h in landing.held], flush=True)
    elif command == "hangup":
        client._session.close()


def fill(pool: PoolMap, slots: list[int], rounds: int) -> None:
    """Write each slot over and over, so that a stop comes in the middle; at last with the slot's own number."""
    memory = np.memmap(pool.path, np.uint8, "r+", pool.offset, (pool.slots, pool.stride))
    print("filling", flush=True)
    for value in range(rounds, -1, -1):
        for slot in slots:
            memory[slot, : pool.geometry.slot_bytes] = (slot + value) % 256


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Namespace)))
