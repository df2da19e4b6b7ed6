"""Upstream's transfer engine from its wheel, over TCP between two processes."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.lines import own_stdout
from benchmarks.peers.mover import BUFFER, Mover, be_target, buffer, start_target

HOST = "127.0.0.1"


def started() -> Any:
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError("the engine does not start")
    return engine


def registered(engine: Any, address: int) -> None:
    if engine.register_memory(address, BUFFER):
        raise RuntimeError("the buffer cannot be registered")


class Upstream(Mover):
    """Its synchronous calls: one at a time on this thread, several at a time on as many threads."""

    def __init__(self) -> None:
        super().__init__()
        self._target, said = start_target("benchmarks.peers.upstream_transfer")
        self.pids.append(self._target.pid)
        self._segment, self._there = said["segment"], said["address"]
        self._engine, self._buffer = started(), buffer()
        self._here = self._buffer.ctypes.data
        registered(self._engine, self._here)
        self._threads = ThreadPoolExecutor(64)
        self._lists: list[tuple[list[int], list[int]]] = []
        self._lengths: list[int] = []
        self._call: Callable[..., int] = self._engine.transfer_sync_read

    async def prepare(self, op: str, size: int, count: int, starts: Sequence[int]) -> None:
        offsets = [range(start, start + size * count, size) for start in starts]
        self._lists = [([self._here + at for at in places], [self._there + at for at in places]) for places in offsets]
        self._lengths = [size] * count
        self._call = getattr(self._engine, f"transfer_sync_{op}" if count == 1 else f"batch_transfer_sync_{op}")

    def _one(self, index: int) -> None:
        here, there = self._lists[index]
        if len(here) == 1:
            failed = self._call(self._segment, here[0], there[0], self._lengths[0])
        else:
            failed = self._call(self._segment, here, there, self._lengths)
        if failed:
            raise RuntimeError(f"it answered {failed}")

    async def move(self, which: Sequence[int]) -> None:
        if len(which) == 1:
            self._one(which[0])
        else:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*[loop.run_in_executor(self._threads, self._one, index) for index in which])


def main() -> None:
    lines = own_stdout()
    if "--target" in sys.argv:
        engine, memory = started(), buffer()
        registered(engine, memory.ctypes.data)
        be_target(lines, segment=f"{HOST}:{engine.get_rpc_port()}", address=memory.ctypes.data)
    else:
        asyncio.run(Upstream().serve(lines))
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
