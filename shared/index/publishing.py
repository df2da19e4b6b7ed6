"""Keeps Redis up to date with what an agent holds: the shell around shared/index/publisher.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Self

from shared.errors import Unavailable
from shared.index import SHARDS, Layout
from shared.index.digest import State, unpack_state
from shared.index.publisher import Publisher
from shared.redis_client import Argument, Call, RedisLink
from shared.redis_scripts import load
from shared.tasks import end

log = logging.getLogger(__name__)

LINGER = 0.003  # seconds that changes are collected before they go
BEAT = 1.0
RETRY_FIRST, RETRY_MOST = 0.1, 2.0
SCAN = 1000  # hash fields per call

_BEAT = 8


class IndexPublisher:
    """Owned by one store agent. Survives the absence of Redis: what is queued is bounded, and all is published anew.

    ``code``: the agent's incarnation (see ``shared.index.code``).
    """

    def __init__(self, redis_url: str, mesh: str, code: bytes, *, shards: int = SHARDS) -> None:
        self._link = RedisLink(redis_url)
        self._keys = Layout(mesh, shards)
        self._core = Publisher(code, shards)
        self._wake = asyncio.Event()
        self._progress = asyncio.Condition()
        self._beats = 0
        self._heard = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="index-publisher")
        return self

    async def __aexit__(self, *exc: object) -> None:
        task, self._task = self._task, None
        await end(task)
        await self._link.close()

    # -- the store's side -----------------------------------------------------------------------------------

    def committed(self, parent: bytes | None, keys: Sequence[bytes], tier: int = 0) -> None:
        """``keys``, consecutive after ``parent``, are held at ``tier`` (0 DRAM, 1 SSD). Never blocks.

        ``parent``: the key before; b"" or the namespace's root for a first block; None when it is not known.
        """
        self._core.committed(parent, keys, tier)
        self._wake.set()

    def evicted(self, keys: Sequence[bytes]) -> None:
        """``keys`` are not held any more, at no tier. Never blocks."""
        self._core.evicted(keys)
        self._wake.set()

    async def flushed(self, timeout: float = 5.0) -> None:
        """Wait until Redis has all changes so far. Raises Unavailable at the deadline."""
        mark = self._core.changed
        self._wake.set()
        try:
            async with asyncio.timeout(timeout), self._progress:
                await self._progress.wait_for(lambda: self._core.reached(mark))
        except TimeoutError as e:
            raise Unavailable(f"the index was not updated within {timeout:g} s", retry_after_ms=1000) from e

    @property
    def synced(self) -> bool:
        """Redis holds what this agent holds, as far as the last answers say."""
        return self._core.synced

    @property
    def lag(self) -> float:
        """Seconds since Redis last answered; infinite before it ever did."""
        return time.monotonic() - self._heard if self._heard else float("inf")

    @property
    def blocks(self) -> int:
        return self._core.blocks

    @property
    def republished(self) -> int:
        """Shards that were published anew so far."""
        return self._core.republished

    # -- the loop -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause, next_beat = RETRY_FIRST, loop.time()
        while True:
            try:
                if loop.time() >= next_beat:
                    next_beat = loop.time() + BEAT
                    await self._beat()
                await self._flights()
                pause = RETRY_FIRST
                await self._idle(next_beat - loop.time())
            except Exception as e:
                if isinstance(e, Unavailable):
                    log.debug("index: %s", e)
                else:
                    log.exception("publishing the index failed")  # a bug must not end it for good
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MOST)
                next_beat = loop.time()

    async def _idle(self, timeout: float) -> None:
        """Until something changes, then a moment more to collect what comes with it."""
        try:
            async with asyncio.timeout(max(timeout, 0)):
                await self._wake.wait()
                await asyncio.sleep(LINGER)
        except TimeoutError:
            pass

    async def _flights(self) -> None:
        self._wake.clear()
        while flights := self._core.take():
            try:
                answers = await self._send(flights)
            except BaseException:
                for shard in flights:
                    self._core.failed(shard)
                raise
            for shard, answer in answers.items():
                self._core.answered(shard, answer)
            self._heard = time.monotonic()
            async with self._progress:
                self._progress.notify_all()
            for shard in self._core.differing:
                await self._reconcile(shard)

    async def _send(self, flights: dict[int, list[bytes]]) -> dict[int, list[tuple[str, State | None]]]:
        keys = self._keys
        calls: list[Call] = [
            ([keys.blocks[shard], keys.stream[shard], keys.taken[shard]], [entry, keys.kept])
            for shard, entries in flights.items()
            for entry in entries
        ]
        answers = iter(await self._link.run_many(load("index_apply"), calls))
        return {shard: [_answer(next(answers)) for _ in entries] for shard, entries in flights.items()}

    async def _beat(self) -> None:
        """Tell every quiet shard's state, and compare it with what Redis holds."""
        self._beats += 1
        beat = self._beats.to_bytes(_BEAT, "little")
        told = {shard: self._core.told(shard) for shard in range(self._keys.shards)}
        quiet = {shard: state for shard, state in told.items() if state is not None}
        keys = self._keys
        calls: list[Call] = [
            ([keys.blocks[shard], keys.taken[shard], keys.told[shard]], [self._core.code, state.pack() + beat])
            for shard, state in quiet.items()
        ]
        for shard, (taken, size) in zip(quiet, await self._link.run_many(load("index_beat"), calls), strict=True):
            self._core.compare(shard, unpack_state(taken) if taken else None, size)
        self._heard = time.monotonic()

    async def _reconcile(self, shard: int) -> None:
        """A republish did not help: read what the hash holds of this agent."""
        cursor, held = b"0", list[bytes]()
        while True:
            args: list[Argument] = [cursor, SCAN, self._core.code]
            cursor, *page = await self._link.run(load("index_held"), [self._keys.blocks[shard]], args)
            held += page[::2]
            if cursor == b"0":
                break
        self._core.reconcile(shard, held)


def _answer(answer: list[Any]) -> tuple[str, State | None]:
    status, held = answer
    return status.decode(), unpack_state(held) if held else None
