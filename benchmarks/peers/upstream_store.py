"""Upstream's store from its wheel: its master, a process that lends the memory, and a client, over TCP."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.keeper import BUFFER, Buffers, Keeper, free_port
from benchmarks.peers.lines import Answer, answer, die_with_parent, own_stdout
from benchmarks.peers.mover import be_target

HOST = "127.0.0.1"
CAPACITY = 2 << 30
LOCAL = 256 << 20
START = 15.0


def joined(master: str, lent: int, local: int) -> Any:
    """A member of the store that lends ``lent`` bytes to it. The master may still be starting."""
    end = time.monotonic() + START
    while True:
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        failed = store.setup(HOST, "P2PHANDSHAKE", lent, local, "tcp", "", master)
        if not failed:
            return store
        if time.monotonic() > end:
            raise RuntimeError(f"the store does not start: {failed}")
        time.sleep(0.2)


class Registered(Keeper):
    """From and into registered buffers, by its calls that copy least."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__(buffers, [os.getpid()])
        ports = free_port(), free_port()
        binary = Path(sys.executable).parent / "mooncake_master"
        argv = [str(binary), f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}", f"--rpc_address={HOST}"]
        argv.append("--eviction_high_watermark_ratio=0.98")
        self._master = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=die_with_parent)
        address = f"{HOST}:{ports[0]}"
        command = [sys.executable, "-m", "benchmarks.peers.upstream_store", "--target", address]
        self._target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._target.stdout is not None
        if not self._target.stdout.readline():
            raise RuntimeError("the process that lends memory has ended")
        self.store = joined(address, 0, LOCAL)
        for memory in (self.source, self.sink):
            if self.store.register_buffer(memory.ctypes.data, BUFFER):
                raise RuntimeError("a buffer cannot be registered")
        self.pids += [self._master.pid, self._target.pid]

    async def put(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        base = self.source.ctypes.data
        if len(keys) == 1:
            done = [self.store.put_from(keys[0], base + places[0], size)]
        else:
            done = self.store.batch_put_from(list(keys), [base + at for at in places], [size] * len(keys))
        if any(done):
            raise RuntimeError(f"put answered {max(done, key=abs)}")

    async def get(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        base = self.sink.ctypes.data
        if len(keys) == 1:
            got = [self.store.get_into(keys[0], base + places[0], size)]
        else:
            got = self.store.batch_get_into(list(keys), [base + at for at in places], [size] * len(keys))
        if any(length != size for length in got):
            raise RuntimeError(f"get answered {got[0]}")

    async def remove(self, keys: Sequence[str], size: int) -> None:
        for key in keys:
            self.store.remove(key, True)


class Plain(Keeper):
    """The same store, by its calls that take and give ``bytes``."""

    def __init__(self, buffers: Buffers, registered: Registered) -> None:
        super().__init__(buffers, registered.pids)
        self._store, self._remove = registered.store, registered.remove
        self._kept = b""

    async def put(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        values = [self.source[at : at + size] for at in places]
        failed = self._store.put(keys[0], values[0]) if len(keys) == 1 else self._store.put_batch(list(keys), values)
        if failed:
            raise RuntimeError(f"put answered {failed}")

    async def get(self, keys: Sequence[str], places: Sequence[int], size: int) -> None:
        values = [self._store.get(keys[0])] if len(keys) == 1 else self._store.get_batch(list(keys))
        if any(len(value) != size for value in values):
            raise RuntimeError("a value is missing")
        self._kept = values[-1]

    def show(self, place: int, size: int) -> None:
        self.sink[place : place + size] = np.frombuffer(self._kept, np.uint8)

    async def remove(self, keys: Sequence[str], size: int) -> None:
        await self._remove(keys, size)


async def serve() -> None:
    lines = own_stdout()
    buffers = Buffers()
    registered = Registered(buffers)
    keepers: dict[str, Keeper] = {"registered": registered, "bytes": Plain(buffers, registered)}

    async def handle(request: Answer) -> Answer:
        return await keepers[request["who"]].handle(request)

    await answer(handle, lines, {"pids": registered.pids})


def main() -> None:
    if "--target" in sys.argv:
        lines = own_stdout()
        store = joined(sys.argv[-1], CAPACITY, 16 << 20)
        be_target(lines)
        store.close()
    else:
        asyncio.run(serve())
    os._exit(0)


if __name__ == "__main__":
    main()
