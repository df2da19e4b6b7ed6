"""Follows the index in Redis: the shell around shared/index/mirror.py. Never blocks the loop for long."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from typing import Any, Self

from redis.exceptions import ResponseError

from shared.errors import Unavailable
from shared.index import SHARDS, Layout
from shared.index.digest import STATE, State, unpack_state
from shared.index.mirror import Mirror
from shared.index.prefix import PrefixIndex
from shared.index.vectors import Lengths
from shared.redis_client import Call, RedisLink, unavailable
from shared.redis_scripts import load
from shared.tasks import end

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two comparisons
LINGER = 0.003  # after the first entry: what comes with it comes on other shards
BLOCK_MS = 500
POLL = 0.02  # where one command cannot read all streams (Redis Cluster)
MOST_ENTRIES = 128  # per shard and read
SCAN = 1000  # keys of a page; plainly, not by a script, which takes Redis twice as long
RETRY_FIRST, RETRY_MOST = 0.1, 2.0
YIELD = 0.002  # seconds of work between two looks at the loop
PORTION = 1 << 15  # bytes of entries applied in one turn of the loop


class IndexMirror:
    """Owned by one process and loop. ``living`` must be told which incarnations count."""

    def __init__(self, redis_url: str, mesh: str, *, shards: int = SHARDS) -> None:
        self._link = RedisLink(redis_url)
        self._keys = Layout(mesh, shards)
        self._core = Mirror(shards)
        self._heard = 0.0
        self._together = True
        self._settled = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="index-mirror")
        return self

    async def __aexit__(self, *exc: object) -> None:
        task, self._task = self._task, None
        await end(task)
        await self._link.close()

    # -- the reader's side ----------------------------------------------------------------------------------

    @property
    def prefix(self) -> PrefixIndex:
        """The columns themselves, for readers who count in numpy."""
        return self._core.prefix

    @property
    def columns(self) -> Mapping[bytes, int]:
        """Code -> column of ``prefix``."""
        return self._core.columns

    def living(self, codes: Collection[bytes]) -> None:
        """The codes of the agents that live now; entries of others do not count."""
        self._core.living(codes, time.monotonic())

    def spare(self, codes: frozenset[bytes]) -> None:
        """Codes that are not to be forgotten, though they do not live (see shared/index/sparing.py)."""
        self._core.spare(codes)

    def match(self, chain: bytes) -> dict[bytes, int]:
        """Code -> blocks of the prefix of ``chain`` (16 bytes a key) that it probably holds; only > 0."""
        return self._core.match(chain)

    def lengths(self, chain: bytes) -> tuple[tuple[bytes, ...], Lengths]:
        """The same as columns: living codes (one object until they change), and blocks of each, 0 too."""
        return self._core.lengths(chain)

    def dram(self, chain: bytes) -> dict[bytes, int]:
        """Code -> blocks of that prefix before the first that is on SSD; only of those that have such a block."""
        return self._core.dram(chain)

    @property
    def synced(self) -> bool:
        """All shards were read, none is known to differ, and Redis answers."""
        return self._core.synced and self.lag < 5 * LOOK

    @property
    def lag(self) -> float:
        """Seconds since Redis last answered; infinite before it ever did."""
        return time.monotonic() - self._heard if self._heard else float("inf")

    def summary(self) -> dict[str, Any]:
        """JSON-able: blocks by agent code (hex), and how well the mirror follows."""
        return {
            "synced": self.synced,
            "lag_s": round(self.lag, 3) if self._heard else None,
            "blocks": {code.hex(): blocks for code, blocks in sorted(self._core.blocks().items())},
            "applied": self._core.applied,
            "differences": dict(self._core.differences),
            "garbage": self._core.garbage,
        }

    # -- the loop -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause, next_look = RETRY_FIRST, loop.time()
        while True:
            try:
                if loop.time() >= next_look:
                    next_look = loop.time() + LOOK
                    await self._look()
                while (shard := self._core.due(loop.time())) is not None:
                    await self._resync(shard)
                await self._follow(next_look - loop.time())
                self._core.prefix.tidy()
                pause = RETRY_FIRST
            except Exception as e:
                if isinstance(e, Unavailable):
                    log.debug("index: %s", e)
                else:
                    log.exception("following the index failed")  # a bug must not end it for good
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MOST)

    async def _look(self) -> None:
        for shard, (tip, _, told) in enumerate(await self._tips(range(self._keys.shards))):
            self._core.look(shard, tip, told)

    async def _tips(
        self, shards: Sequence[int]
    ) -> list[tuple[int, dict[bytes, State], dict[bytes, tuple[State, int]]]]:
        keys = self._keys
        calls: list[Call] = [([keys.stream[n], keys.taken[n], keys.told[n]], []) for n in shards]
        answers = await self._link.run_many(load("index_tip"), calls)
        self._heard = time.monotonic()
        return [
            (
                _number(tip),
                {code: unpack_state(state) for code, state in _pairs(taken)},
                {code: (unpack_state(told), int.from_bytes(told[STATE:], "little")) for code, told in _pairs(known)},
            )
            for tip, taken, known in answers
        ]

    # -- following ------------------------------------------------------------------------------------------

    async def _follow(self, timeout: float) -> None:
        """Read and apply until nothing is left, or wait for the first entry at most ``timeout`` seconds."""
        read = await self._read(max(1, int(1000 * min(timeout, BLOCK_MS / 1000))))
        if read and any(len(entries) < MOST_ENTRIES for entries in read.values()):
            await asyncio.sleep(LINGER)
            more = await self._read(0, {shard: entries[-1][0] for shard, entries in read.items()})
            for shard, entries in more.items():
                read.setdefault(shard, []).extend(entries)
        for some in portions(read, PORTION):
            self._core.apply(some, asyncio.get_running_loop().time())
            await asyncio.sleep(0)

    async def _read(self, block: int, after: Mapping[int, int] | None = None) -> dict[int, list[tuple[int, bytes]]]:
        """Entries of all shards behind their cursors; ``block`` ms (0: not at all) where there are none."""
        cursors = {shard: self._core.cursor(shard) for shard in range(self._keys.shards)}
        wanted = {shard: cursor for shard, cursor in cursors.items() if cursor is not None} | dict(after or {})
        if not wanted:
            await asyncio.sleep(min(block / 1000, POLL))
            return {}
        with unavailable():
            found = await self._xread(wanted, block)
        self._heard = time.monotonic()
        return {shard: entries for shard, entries in found.items() if entries}

    async def _xread(self, cursors: Mapping[int, int], block: int) -> dict[int, list[tuple[int, bytes]]]:
        if self._together:
            try:
                return self._entries(await self._command(list(cursors.items()), block))
            except ResponseError as e:
                if "CROSSSLOT" not in str(e):
                    raise
                self._together = False
        out: dict[int, list[tuple[int, bytes]]] = {}
        for item in cursors.items():
            out |= self._entries(await self._command([item], 0))
        if block and not any(out.values()):
            await asyncio.sleep(POLL)
        return out

    async def _command(self, cursors: Sequence[tuple[int, int]], block: int) -> Any:
        streams = {self._keys.stream[shard]: _id(cursor) for shard, cursor in cursors}
        return await self._link.client.xread(streams, count=MOST_ENTRIES, block=block or None)

    def _entries(self, answer: Any) -> dict[int, list[tuple[int, bytes]]]:
        names = {name.encode(): shard for shard, name in enumerate(self._keys.stream)}
        streams = answer.items() if isinstance(answer, dict) else answer or ()
        return {
            names[name]: [(_number(id), fields[b"e"]) for id, fields in _flat(entries) if b"e" in fields]
            for name, entries in streams
        }

    # -- reading a shard anew -------------------------------------------------------------------------------

    async def _resync(self, shard: int) -> None:
        """rule: id_first. Reading takes many round trips, merging many slices: the loop breathes in between."""
        try:
            ((tip, taken, _),) = await self._tips([shard])
            self._core.begin(shard, tip, taken)
            async with contextlib.aclosing(self._pages(shard)) as pages:
                async for page in pages:
                    self._core.page(shard, page)
            ((tip, _, _),) = await self._tips([shard])
            started = time.monotonic()
            for _ in self._core.finish(shard, tip, started):
                if time.monotonic() - started > YIELD:
                    await asyncio.sleep(0)
                    started = time.monotonic()
        except BaseException:
            self._core.give_up(shard, asyncio.get_running_loop().time())
            raise
        if not self._settled:  # what is there now mostly stays: a full collection need not go through it (50 ms)
            self._settled = True
            gc.freeze()

    async def _pages(self, shard: int) -> AsyncGenerator[Mapping[bytes, bytes], None]:
        """The shard's hash; Redis makes the next page while one is looked at."""
        coming = asyncio.create_task(self._page(shard, 0))
        try:
            while True:
                cursor, page = await coming
                if cursor:
                    coming = asyncio.create_task(self._page(shard, cursor))
                    await asyncio.sleep(0)  # so that it is asked for
                yield page
                if not cursor:
                    return
        finally:
            await end(coming)

    async def _page(self, shard: int, cursor: int) -> tuple[int, Mapping[bytes, bytes]]:
        with unavailable():
            found: tuple[int, Mapping[bytes, bytes]] = await self._link.client.hscan(
                self._keys.blocks[shard], cursor, count=SCAN
            )
        return found


def portions(
    read: Mapping[int, Sequence[tuple[int, bytes]]], most: int
) -> Iterator[Mapping[int, Sequence[tuple[int, bytes]]]]:
    """``read`` in pieces of about ``most`` bytes, in order, every shard's entries spread evenly over them: what belongs
    together stays close together."""
    size = sum(len(payload) for entries in read.values() for _, payload in entries)
    pieces = max(1, -(-size // most))
    for piece in range(pieces):
        cuts = {n: (piece * len(e) // pieces, (piece + 1) * len(e) // pieces) for n, e in read.items()}
        yield {n: read[n][begin:end] for n, (begin, end) in cuts.items() if begin < end or pieces == 1}


def _number(id: bytes) -> int:
    milliseconds, sequence = id.split(b"-")
    return int(milliseconds) << 64 | int(sequence)


def _id(number: int) -> str:
    return f"{number >> 64}-{number & (1 << 64) - 1}"


def _pairs(flat: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _flat(entries: Any) -> Any:
    """The client answers a stream as [entries] or as entries, by protocol version."""
    return entries[0] if entries and isinstance(entries[0], list) else entries
