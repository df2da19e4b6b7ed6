"""An agent with an SSD tier whose pool is written over for ever: ``ssd_process.py FOLDER [FIRST]``, to be killed."""

from __future__ import annotations

import asyncio
import hashlib
import random
import sys
from uuid import uuid4

from services.store.agent import run_agent
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.memory import stride_of
from services.store.settings import StoreSettings
from shared.blocks import Namespace

NAMESPACE = Namespace(
    model="ab", weights="cd", tokenizer="ef", dtype="float32", layers=4, kv_heads=2, head_dim=16, block_size=16
)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def content_of(number: int) -> bytes:
    size = NAMESPACE.geometry.slot_bytes
    return random.Random(number).randbytes(size if number % 3 else size - 100)


async def main(folder: str, number: int) -> None:
    settings = StoreSettings(
        socket="@test-" + uuid4().hex,
        pool_bytes=32 * stride_of(NAMESPACE.geometry),
        ssd_path=folder,
        ssd_bytes=128 * stride_of(NAMESPACE.geometry),
        ssd_ahead=0.5,
    )
    async with run_agent(settings, LocalDirectory(Board())) as agent:
        client = await StoreClient.connect(settings.socket, NAMESPACE)
        while True:
            await client.put([(key_of(i), content_of(i)) for i in range(number, number + 8)])
            number += 8
            agent.ssd.look()
            print(len(agent.ssd.book), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
