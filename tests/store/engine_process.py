"""A store client in a process of its own, obeying lines on stdin: ``reserve N ...``, ``landing N``, ``hangup``."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec

from services.store.client import StoreClient
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from shared.messages import Ref


async def serve(address: str, namespace: Namespace) -> None:
    client = await StoreClient.connect(address, namespace, owner_name="child", secret="s")
    print("ready", flush=True)
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        await obey(client, *line)
        print("done", flush=True)


async def obey(client: Any, command: str, *arguments: str) -> None:
    owner = Owner("child/1")
    if command == "reserve":
        keys = [f"child-{int(i):010d}".encode()[:16] for i in arguments]
        await client.reserve(keys, owner, PoolClass.PREFILL, 5.0)
    elif command == "landing":
        n = int(arguments[0])
        writer = Ref(arguments[1], int(arguments[2])) if len(arguments) > 2 else Ref("nobody", 1)
        landing = await client.open_landing([], n, n * client.pool.geometry.block_size, writer, owner, 5.0)
        print(landing.token, *[h.slot for h in landing.held], flush=True)
    elif command == "hangup":
        client._session.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Namespace)))
