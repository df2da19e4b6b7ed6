"""This project's transfer engine over shm and over tcp, and the machine's limits in the same process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from benchmarks import transfer
from benchmarks.peers.lines import Answer, answer, own_stdout
from benchmarks.peers.mover import Mover
from services.store.transfer.base import Op, Request, Status
from services.store.transfer.engine import Engine

WHERE = "pool"
TIMEOUT = 60.0


class Limit(Mover):
    """One call for all that lies end to end."""

    def __init__(self, move: transfer.Move, target: int) -> None:
        super().__init__()
        self.pids.append(target)
        self._move = move
        self._op, self._size, self._count, self._starts = Op.READ, 0, 0, list[int]()

    async def prepare(self, op: str, size: int, count: int, starts: Sequence[int]) -> None:
        self._op, self._size, self._count, self._starts = Op(op), size, count, list(starts)

    async def move(self, which: Sequence[int]) -> None:
        for index in which:
            await self._move(self._op, self._starts[index], self._size, self._count)


class Ours(Mover):
    def __init__(self, engine: Engine, target: int) -> None:
        super().__init__()
        self.pids.append(target)
        self._engine = engine
        self._requests: list[list[Request]] = []

    async def prepare(self, op: str, size: int, count: int, starts: Sequence[int]) -> None:
        to, peer = Op(op), transfer.TARGET
        self._requests = [
            [Request(to, WHERE, at, peer, WHERE, at, size) for at in range(start, start + size * count, size)]
            for start in starts
        ]

    async def move(self, which: Sequence[int]) -> None:
        if len(which) == 1:
            await self._one(which[0])
        else:
            await asyncio.gather(*map(self._one, which))

    async def _one(self, index: int) -> None:
        results = await self._engine.transfer(self._requests[index], TIMEOUT)
        if any(result.status is not Status.COMPLETED for result in results):
            raise RuntimeError(str(next(result.error for result in results if result.error)))


async def serve() -> None:
    lines = own_stdout()
    with transfer.target() as (pid, addresses):
        pool = transfer.Pool()
        async with transfer.engines(pool, addresses) as running:
            movers: dict[str, Mover] = {
                "memcpy": Limit(transfer.memcpy(pool), pid),
                "raw socket": Limit(transfer.raw(pool, addresses[-1]), pid),
                "2 raw streams": Limit(transfer.raw_streams(pool, addresses[-1], 2), pid),
                **{name: Ours(engine, pid) for name, engine in running.items()},
            }

            async def handle(request: Answer) -> Answer:
                return await movers[request["who"]].handle(request)

            await answer(handle, lines, {"pids": [os.getpid(), pid]})


if __name__ == "__main__":
    asyncio.run(serve())
