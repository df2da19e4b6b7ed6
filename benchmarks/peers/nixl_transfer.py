"""NIXL with its UCX backend between two processes; which transport UCX takes is in the environment (``UCX_TLS``)."""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.lines import own_stdout
from benchmarks.peers.mover import BUFFER, Mover, be_target, buffer, start_target

PACKAGE = "nixl_cu12._api"


def agent(name: str, progress: bool) -> Any:
    """The target needs the thread that makes progress (TCP is emulated by its processor); the mover polls itself."""
    api = importlib.import_module(PACKAGE)
    return api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=progress, backends=["UCX"]))


class Nixl(Mover):
    """Prepared lists of all blocks, as connectors of inference engines use it."""

    def __init__(self) -> None:
        super().__init__()
        self._target, said = start_target("benchmarks.peers.nixl_transfer")
        self.pids.append(self._target.pid)
        self._agent, self._buffer = agent("mover", progress=False), buffer()
        self._there = said["address"]
        self._registered = self._agent.register_memory([(self._buffer.ctypes.data, BUFFER, 0, "")], "DRAM")
        remote = self._agent.add_remote_agent(base64.b64decode(said["metadata"]))
        self._remote = remote.decode() if isinstance(remote, bytes) else remote
        self._lists: dict[int, tuple[Any, Any]] = {}
        self._size, self._op = 0, ""
        self._indices: list[list[int]] = []

    def wake(self) -> None:
        os.kill(self._target.pid, signal.SIGCONT)

    def rest(self) -> None:
        os.kill(self._target.pid, signal.SIGSTOP)

    async def prepare(self, op: str, size: int, count: int, starts: Sequence[int]) -> None:
        self._size, self._op = size, op.upper()
        if size not in self._lists:
            places = range(0, BUFFER - size + 1, size)
            here = [(self._buffer.ctypes.data + at, size, 0) for at in places]
            there = [(self._there + at, size, 0) for at in places]
            prepare = self._agent.prep_xfer_dlist
            self._lists[size] = prepare("", here, "DRAM"), prepare(self._remote, there, "DRAM")
        self._indices = [list(range(start // size, start // size + count)) for start in starts]

    async def move(self, which: Sequence[int]) -> None:
        flying = [self._post(self._indices[index]) for index in which]
        while flying:
            os.sched_yield()  # else the target's thread waits for this one where cores are few
            flying = [handle for handle in flying if not self._over(handle, self._agent.check_xfer_state(handle))]

    def _post(self, blocks: list[int]) -> Any:
        here, there = self._lists[self._size]
        handle = self._agent.make_prepped_xfer(self._op, here, blocks, there, blocks)
        self._agent.transfer(handle)
        return handle

    def _over(self, handle: Any, state: str) -> bool:
        if state == "PROC":
            return False
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a transfer ended as {state}")
        return True


def main() -> None:
    lines = own_stdout()
    if "--target" in sys.argv:
        target, memory = agent("target", progress=True), buffer()
        target.register_memory([(memory.ctypes.data, BUFFER, 0, "")], "DRAM")
        metadata = base64.b64encode(target.get_agent_metadata()).decode()
        be_target(lines, metadata=metadata, address=memory.ctypes.data)
    else:
        asyncio.run(Nixl().serve(lines))
    os._exit(0)


if __name__ == "__main__":
    main()
