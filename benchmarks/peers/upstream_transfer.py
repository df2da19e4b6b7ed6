"""Upstream's transfer engine from its wheel, over TCP between two processes."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Sequence
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
    """Its synchronous calls, which let go of the GIL."""

    def __init__(self) -> None:
        super().__init__()
        self._target, said = start_target("benchmarks.peers.upstream_transfer")
        self.pids.append(self._target.pid)
        self._segment, self._there = said["segment"], said["address"]
        self._engine, self._buffer = started(), buffer()
        self._here = self._buffer.ctypes.data
        registered(self._engine, self._here)
        self._places: list[range] = []
        self._size, self._op = 0, ""

    async def prepare(self, op: str, size: int, count: int, starts: Sequence[int]) -> None:
        self._places = [range(start, start + size * count, size) for start in starts]
        self._size, self._op = size, op

    async def move(self, which: Sequence[int]) -> None:
        """All in one batch: as many threads that wait in its calls only keep it from its work."""
        places = [at for index in which for at in self._places[index]]
        here, there = [self._here + at for at in places], [self._there + at for at in places]
        if len(places) == 1:
            failed = getattr(self._engine, f"transfer_sync_{self._op}")(self._segment, here[0], there[0], self._size)
        else:
            call = getattr(self._engine, f"batch_transfer_sync_{self._op}")
            failed = call(self._segment, here, there, [self._size] * len(places))
        if failed:
            raise RuntimeError(f"it answered {failed}")


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
