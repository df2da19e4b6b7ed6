"""A client of the stress program, as a process of its own: ``python -m benchmarks.stress.client JOB``."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from benchmarks.stress.board import Board, Count
from benchmarks.stress.content import Mismatch, check, content, key_of
from services.store.client import StoreClient, plain_namespace
from services.store.objects import PoolBytes
from shared.engines.base import Held, LandingTarget, Owner, PoolClass, Run
from shared.errors import MooncakeError

TIMEOUT = 4.0
RETRY = 0.1
SPACE = "stress"


class Job(msgspec.Struct, frozen=True):
    """``sockets``: the agent's own, then another's. ``keys``: of the working set. ``row``: of the board."""

    role: str
    number: int
    row: int
    sockets: list[str]
    board: str
    writers: int
    keys: int
    block_bytes: int
    depth: int
    seed: int


class Attached:
    """A connection to one agent that is made again when the agent dies."""

    def __init__(self, socket: str, job: Job) -> None:
        self._socket = socket
        self._space = plain_namespace(SPACE, job.block_bytes)
        self._name = f"{job.role} {job.number}"
        self._lock = asyncio.Lock()
        self._client: StoreClient | None = None
        self._bytes: PoolBytes | None = None

    async def client(self) -> StoreClient:
        """Raises MooncakeError."""
        async with self._lock:
            if self._client is None or self._client.closed:
                await self.close()
                self._client = await StoreClient.connect(
                    self._socket, self._space, owner_name=self._name, timeout=TIMEOUT
                )
                self._bytes = PoolBytes(self._client.pool)
            return self._client

    @property
    def bytes(self) -> PoolBytes:
        """The pool of the connection made last."""
        assert self._bytes is not None
        return self._bytes

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class Worker:
    """What one process does until it is told to stop; its calls are repeated at ``depth``."""

    def __init__(self, job: Job, board: Board) -> None:
        self.job = job
        self.board = board
        self.rng = random.Random(job.seed)
        self.here = Attached(job.sockets[0], job)
        self.there = Attached(job.sockets[1], job)
        self._steps: dict[str, Callable[[], Awaitable[None]]] = {
            "writer": self.write,
            "reader": self.read,
            "holder": self.hold,
            "evictor": self.evict,
            "lander": self.land,
        }

    async def run(self) -> None:
        while True:
            try:
                await self._steps[self.job.role]()
                self.count(Count.OPS)
            except MooncakeError:
                self.count(Count.ERRORS)
                await asyncio.sleep(RETRY)

    async def close(self) -> None:
        await self.here.close()
        await self.there.close()

    def count(self, what: Count, amount: int = 1) -> None:
        self.board.add(self.job.row, what, amount)

    def some(self, most: int = 8) -> list[int]:
        return self.rng.sample(range(self.job.keys), self.rng.randint(1, most))

    def checked(self, number: int, data: bytes, whole: bool = False) -> int:
        """The generation; a mismatch is counted and said."""
        key = key_of(SPACE, number)
        try:
            self.count(Count.BYTES, len(data))
            return check(key, data, self.job.block_bytes, lambda g: self.board.issued(number, g), whole)
        except Mismatch as error:
            self.count(Count.MISMATCHES)
            print(f"MISMATCH {self.job.role} {self.job.number}: key {number} ({key.hex()}): {error}", file=sys.stderr)
            return 0

    def made(self, number: int, whole: bool = False) -> bytes:
        """New bytes for a key; writers alone may call it, with a number of their own."""
        generation = self.board.next_generation(self.job.number, number)
        return content(key_of(SPACE, number), generation, self.job.block_bytes, whole)

    # -- roles -----------------------------------------------------------------------------------------------

    async def write(self) -> None:
        """Now and then over what was there: other bytes under the same key."""
        client, numbers = await self.here.client(), self.some()
        keys = [key_of(SPACE, number) for number in numbers]
        if self.rng.random() < 0.5:
            await client.remove(keys, TIMEOUT)
        results = await client.put([(key, self.made(n)) for key, n in zip(keys, numbers, strict=True)], TIMEOUT)
        self.count(Count.ERRORS, sum(result.error is not None for result in results))

    async def read(self) -> None:
        client, numbers = await self.here.client(), self.some()
        found = await client.get([key_of(SPACE, number) for number in numbers], TIMEOUT)
        for number, data in zip(numbers, found, strict=True):
            if data is not None:
                self.checked(number, data)
        self.count(Count.HITS, sum(data is not None for data in found))
        self.count(Count.MISSES, found.count(None))

    async def hold(self) -> None:
        """As an engine: blocks are read in place, more than once while they are held."""
        client, numbers = await self.here.client(), self.some(4)
        mapped, owner = self.here.bytes, Owner(f"hold/{self.rng.random()}")
        keys = [key_of(SPACE, number) for number in numbers]
        found = await client.fetch(keys, b"", [], owner, PoolClass.GROWTH, TIMEOUT, chained=False)
        mine = [(number, f.held, f.length) for number, f in zip(numbers, found, strict=True) if f.held is not None]
        try:
            first = self._look(mapped, mine)
            await asyncio.sleep(self.rng.random() * 0.05)
            if self._look(mapped, mine) != first:
                self.count(Count.MISMATCHES)
                print(f"MISMATCH holder {self.job.number}: a block changed while it was held", file=sys.stderr)
        finally:
            await client.release([held for _, held, _ in mine])

    def _look(self, mapped: PoolBytes, mine: list[tuple[int, Held, int]]) -> list[int]:
        return [self.checked(number, mapped.read(held.slot, length)) for number, held, length in mine]

    async def evict(self) -> None:
        """Fillers that nobody asks for, each stored once."""
        client = await self.here.client()
        keys = [self.rng.randbytes(16) for _ in range(8)]
        await client.put([(key, content(key, 1, self.job.block_bytes)) for key in keys], TIMEOUT)

    async def land(self) -> None:
        """Streams blocks from one agent's pool into a landing at another, and checks what has landed there."""
        writer, reader = await self.here.client(), await self.there.client()
        source, target = self.here.bytes, self.there.bytes
        number, owner = self.rng.randrange(self.job.keys), Owner(f"land/{self.rng.random()}")
        blocks = self.rng.randint(1, 3)
        slots = await writer.allocate(blocks, owner, PoolClass.PREFILL, TIMEOUT)
        try:
            for slot in slots:
                source.write(slot.slot, self.made(number, whole=True))
            landing = await reader.open_landing([], blocks, 16 * blocks, writer.agent, owner, TIMEOUT)
            kept: list[Held] = []
            try:
                to = LandingTarget(reader.agent, landing.token, [h.slot for h in landing.held])
                runs = [Run(s.slot, i, 0, 1, first, first + 8) for i, s in enumerate(slots) for first in (0, 8)]
                await writer.stream(to, runs, owner, TIMEOUT)
                if not await reader.missing(landing, TIMEOUT):
                    kept = await reader.close_landing(landing, keep=True)
            finally:
                if not kept:
                    await reader.close_landing(landing, keep=False)
            for h in kept:
                self.checked(number, target.read(h.slot, self.job.block_bytes), whole=True)
            await reader.release(kept)
        finally:
            await writer.release(slots)


async def main(job: Job) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    worker = Worker(job, Board(Path(job.board), job.writers, job.keys))
    tasks = [asyncio.create_task(worker.run()) for _ in range(job.depth)]
    ended = asyncio.create_task(stopping.wait())
    await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()  # a bug of the program itself: ends it, with its traceback
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    with contextlib.suppress(MooncakeError):
        await worker.close()


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Job)))
