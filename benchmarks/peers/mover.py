"""A transfer contender: moves blocks between its own buffer and that of a target process."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.lines import Answer, answer, die_with_parent, series

BUFFER = 256 << 20
"""Bytes on each side. Series walk over them: caches stay as cold as in use."""
TOUCH = 4 << 20


def buffer() -> npt.NDArray[np.uint8]:
    """Page-aligned, every page of it touched."""
    memory = np.frombuffer(mmap.mmap(-1, BUFFER), np.uint8)
    memory.fill(1)
    return memory


class Mover(ABC):
    """Subclasses know how to reach their target. ``pids``: all processes of the contender."""

    def __init__(self) -> None:
        self.pids: list[int] = [os.getpid()]
        self._touched: set[str] = set()

    @abstractmethod
    async def prepare(self, op: str, size: int, count: int, starts: Sequence[int]) -> None:
        """Untimed: lists of ``count`` blocks of ``size`` bytes that lie end to end, from each start on."""

    @abstractmethod
    async def move(self, which: Sequence[int]) -> None:
        """Move the blocks of the starts with these indices, all at one time."""

    def wake(self) -> None:
        """Before a series: let helpers run that were put to sleep."""
        return None

    def rest(self) -> None:
        """After it: what spins although nothing is moved is put to sleep, so that it disturbs no other contender."""
        return None

    async def handle(self, request: Answer) -> Answer:
        size, count, tasks = request["size"], request["count"], request["tasks"]
        step = size * count
        room = max(1, BUFFER // step)
        if step > BUFFER:
            return {"error": f"{step} bytes in one call, and the buffer has {BUFFER}"}
        self.wake()
        await self._touch(request["op"])
        starts = [k % room * step for k in range(max(tasks, min(room, 512)))]
        await self.prepare(request["op"], size, count, starts)
        at = 0

        async def once() -> None:
            nonlocal at
            which = [(at + k) % len(starts) for k in range(tasks)]
            at = (at + tasks) % len(starts)
            await self.move(which)

        if step * tasks < BUFFER:
            await once()
        found = await series(once, request["seconds"], self.pids, least=1)
        self.rest()
        return found

    async def _touch(self, op: str) -> None:
        """Before the first series: every page of both buffers is mapped wherever this way of moving maps it."""
        if op not in self._touched:
            self._touched.add(op)
            await self.prepare(op, TOUCH, 1, range(0, BUFFER, TOUCH))
            for index in range(BUFFER // TOUCH):
                await self.move([index])

    async def serve(self, lines: IO[str]) -> None:
        self.rest()
        await answer(self.handle, lines, {"pids": self.pids})
        self.wake()


def start_target(module: str) -> tuple[subprocess.Popen[str], Answer]:
    """This contender's target process, and what it says of itself. It ends with us."""
    argv = [sys.executable, "-m", module, "--target"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"the target ended with {child.wait()}")
    said: Answer = json.loads(line)
    return child, said


def be_target(lines: IO[str], **said: Any) -> None:
    """In the target: say how it is reached, live until the mover closes our input or dies."""
    die_with_parent()
    lines.write(json.dumps(said) + "\n")
    sys.stdin.read()
