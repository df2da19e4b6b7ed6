"""The processes of the SSD benchmark: an agent that stands alone and times its own thread, and a client that puts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from services.store.agent import run_agent
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.settings import StoreSettings
from shared.blocks import Namespace

NAMESPACE = Namespace(
    model="ab", weights="cd", tokenizer="ef", dtype="float32", layers=4, kv_heads=4, head_dim=32, block_size=16
)
BLOCK = NAMESPACE.geometry.slot_bytes  # 64 KiB
BEAT = 0.01
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Node:
    """A running agent of a process of its own. ``end`` gives how late its beating thread was, in seconds, sorted."""

    socket: str
    pid: int
    process: subprocess.Popen[bytes]

    def end(self) -> list[float]:
        late, _ = self.process.communicate()
        return sorted(json.loads(late.splitlines()[-1]))


@contextlib.contextmanager
def node(dram: int, folder: str = "", size: int = 0) -> Iterator[Node]:
    """An agent of ``dram`` bytes, with an SSD tier of ``size`` bytes in ``folder`` where one is named."""
    socket = "@bench-" + uuid4().hex
    settings = {"socket": socket, "pool_bytes": dram, "ssd_path": folder, "ssd_bytes": size, "ssd_flush": 0.0}
    command = [sys.executable, "-m", "benchmarks.ssd_processes", "agent", json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        try:
            yield Node(socket, child.pid, child)
        finally:
            if child.returncode is None:
                child.communicate()


@contextlib.contextmanager
def putting(socket: str) -> Iterator[None]:
    """A process that writes new blocks as fast as it can."""
    command = [sys.executable, "-m", "benchmarks.ssd_processes", "put", socket]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield
        finally:
            child.kill()


# -- inside ------------------------------------------------------------------------------------------------------


async def agent(settings: dict[str, Any]) -> None:
    late: list[float] = []
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            before = time.monotonic()
            time.sleep(BEAT)
            late.append(time.monotonic() - before - BEAT)

    async with run_agent(StoreSettings(**settings, log_level="warning"), LocalDirectory(Board())):
        print("up", flush=True)
        threading.Thread(target=beat, daemon=True).start()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        ended.set()
    print(json.dumps(late), flush=True)


async def put(socket: str) -> None:
    rng, data = np.random.default_rng(), bytes(BLOCK)
    async with await StoreClient.connect(socket, NAMESPACE) as client:
        print("up", flush=True)
        while True:
            await client.put([(rng.bytes(16), data) for _ in range(16)])


if __name__ == "__main__":
    asyncio.run(put(sys.argv[2]) if sys.argv[1] == "put" else agent(json.loads(sys.argv[2])))
