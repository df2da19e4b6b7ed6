"""Blocks as objects: put, get and remove bytes under 16-byte keys, in batches, with a result for each item in order."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from services.store.local_messages import Posted
from services.store.mailbox import SIZE as MAILBOX
from services.store.session import GRACE
from shared.blocks import KEY
from shared.engines.base import Held, Kind, Owner, PoolClass, PoolMap
from shared.errors import DeadlineExceeded, InvalidInput, MooncakeError, PoolFull, QuotaExceeded
from shared.tasks import to_the_end

if TYPE_CHECKING:
    from services.store.client import StoreClient

Data = bytes | bytearray | memoryview
Buffer = bytearray | memoryview
T = TypeVar("T")

BATCH = 64
"""Objects in flight at one time; fewer in a small pool."""

AT_ONCE = 1 << 20
"""Bytes that are copied on the caller's loop: telling a thread, and hearing of it, takes as long."""

ATTEMPTS = 8
"""How often a key whose other writer aborted is tried again."""


Read = Callable[[int, int, int], T]
"""(number of the item, slot, length) -> what its caller gets."""


@dataclass(frozen=True)
class Put:
    """Result for one item. ``stored`` False without ``error``: the key was there already, and was not changed."""

    stored: bool
    error: MooncakeError | None = None


class PoolBytes:
    """The pool, mapped for copies that do not hold the GIL."""

    def __init__(self, pool: PoolMap) -> None:
        with open(pool.path, "r+b", buffering=0) as file:
            self._map = mmap.mmap(file.fileno(), pool.offset + pool.slots * pool.stride)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._pool = pool

    def write(self, slot: int, data: Data) -> None:
        at, source = self._pool.offset + slot * self._pool.stride, np.frombuffer(data, np.uint8)
        np.copyto(self._bytes[at : at + source.size], source)

    def read(self, slot: int, length: int) -> bytes:
        at = self._pool.offset + slot * self._pool.stride
        return self._bytes[at : at + length].tobytes()

    def read_into(self, slot: int, length: int, into: Buffer) -> None:
        at = self._pool.offset + slot * self._pool.stride
        np.copyto(np.frombuffer(into, np.uint8, length), self._bytes[at : at + length])


class Objects:
    """Over one client. ``name`` is its owner in the pool."""

    def __init__(self, client: StoreClient, name: str, tenant: str = "") -> None:
        self._client = client
        self._owner = Owner(name, tenant=tenant)
        self._bytes = PoolBytes(client.pool)
        self._batch = max(1, min(BATCH, client.pool.slots // 8))

    # -- put -------------------------------------------------------------------------------------------

    async def put(self, items: Sequence[tuple[bytes, Data]], timeout: float) -> list[Put]:
        out: list[Put] = []
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        for batch in batches(items, self._batch):
            if loop.time() > end + GRACE / 2:  # the agent does not answer: the others would wait one after the other
                late = Put(False, DeadlineExceeded(f"not stored within {timeout:g} s"))
                return out + [late] * (len(items) - len(out))
            out += await self._put_batch(batch, end)
        return out

    async def _put_batch(self, items: Sequence[tuple[bytes, Data]], end: float) -> list[Put]:
        results = [self._refusal(key, data) for key, data in items]
        left = await self._post(items, [i for i, result in enumerate(results) if result is None], results, end)
        for _ in range(ATTEMPTS):
            if not left:
                break
            left = await self._try_put(items, left, results, end)
        busy = Put(False, PoolFull("another writer of this key keeps aborting"))
        return [result or busy for result in results]

    async def _post(
        self, items: Sequence[tuple[bytes, Data]], left: list[int], results: list[Put | None], end: float
    ) -> list[int]:
        """Few bytes, in one round trip; returns what must be tried another way."""
        values = [memoryview(items[i][1]).cast("B") for i in left]
        if not left or sum(map(len, values)) > MAILBOX:
            return left
        try:
            timeout = max(0.0, end - asyncio.get_running_loop().time())
            posted = await self._client.post([items[i][0] for i in left], values, self._owner, timeout)
        except MooncakeError as e:
            results[:] = [result or Put(False, e) for result in results]
            return []
        for i, outcome in zip(left, posted, strict=True):
            results[i] = None if outcome is Posted.LATER else Put(outcome is Posted.STORED)
        return [i for i in left if results[i] is None]

    def _refusal(self, key: bytes, data: Data) -> Put | None:
        size = self._client.pool.geometry.slot_bytes
        if len(key) != KEY:
            return Put(False, InvalidInput(f"a key has {KEY} bytes, not {len(key)}", field="key"))
        if not 0 < memoryview(data).nbytes <= size:
            return Put(
                False, InvalidInput(f"an object has 1 to {size} bytes, not {memoryview(data).nbytes}", field="data")
            )
        return None

    async def _try_put(
        self, items: Sequence[tuple[bytes, Data]], left: Sequence[int], results: list[Put | None], end: float
    ) -> list[int]:
        """Fill in ``results``; returns what must be tried again."""
        keys = [items[i][0] for i in left]
        try:
            held = await self._client.reserve(keys, self._owner, PoolClass.CACHE, left_until(end))
        except MooncakeError as e:
            half = len(left) // 2
            if half and isinstance(e, QuotaExceeded):  # one after the other they may make way for each other
                first = await self._try_put(items, left[:half], results, end)
                return first + await self._try_put(items, left[half:], results, end)
            for i in left:
                results[i] = Put(False, e)
            return []
        for i, h in zip(left, held, strict=True):
            if h.kind is Kind.PRESENT:
                results[i] = Put(False)
        over = False
        try:
            await self._write(items, [(i, h) for i, h in zip(left, held, strict=True) if h.kind is Kind.NEW], results)
            over = True
        finally:
            await self._client.release([h for h in held if not over or h.kind is Kind.PRESENT])
        again = [i for i, h in zip(left, held, strict=True) if h.kind is Kind.IN_PROGRESS]
        return [i for i in again if not await self._written_by_other(items[i][0], i, results, left_until(end))]

    async def _write(
        self, items: Sequence[tuple[bytes, Data]], new: Sequence[tuple[int, Held]], results: list[Put | None]
    ) -> None:
        """Bytes, then the commit, with which the holds end."""
        if not new:
            return
        keys, lengths = [items[i][0] for i, _ in new], [memoryview(items[i][1]).nbytes for i, _ in new]
        await copied(lambda: self._write_all([(h.slot, items[i][1]) for i, h in new]), sum(lengths))
        holds = [h for _, h in new]
        committed = await self._client.commit_objects(holds, b"", keys, lengths, release=True)
        for (i, _), h in zip(new, committed, strict=True):
            results[i] = Put(h.kind is Kind.PRESENT)

    def _write_all(self, writes: Sequence[tuple[int, Data]]) -> None:
        for slot, data in writes:
            self._bytes.write(slot, data)

    async def _written_by_other(self, key: bytes, i: int, results: list[Put | None], timeout: float) -> bool:
        """Somebody else, or an earlier item of the batch, writes this key: wait for the outcome."""
        try:
            held = await self._client.wait(key, self._owner, timeout)
        except MooncakeError as e:
            results[i] = Put(False, e)
            return True
        if held is None:
            return False
        await self._client.release([held])
        results[i] = Put(False)
        return True

    # -- get -------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[bytes], timeout: float) -> list[bytes | None]:
        return await self._get(keys, lambda _, slot, length: self._bytes.read(slot, length), timeout)

    async def get_into(self, items: Sequence[tuple[bytes, Buffer]], timeout: float) -> list[int | None]:
        for _, into in items:
            if memoryview(into).readonly or not memoryview(into).c_contiguous:
                raise InvalidInput("a buffer is writable and contiguous", field="buffer")

        def read(number: int, slot: int, length: int) -> int:
            into = items[number][1]
            if length <= memoryview(into).nbytes:
                self._bytes.read_into(slot, length, into)
            return length

        return await self._get([key for key, _ in items], read, timeout)

    async def _get(self, keys: Sequence[bytes], read: Read[T], timeout: float) -> list[T | None]:
        """``read`` of each object that there is; None for the others."""
        out: list[T | None] = [None] * len(keys)
        end = asyncio.get_running_loop().time() + timeout
        for batch in batches([i for i, key in enumerate(keys) if len(key) == KEY], self._batch):
            asked, left = [keys[i] for i in batch], left_until(end)
            fetched = await self._client.fetch(asked, b"", [], self._owner, PoolClass.CACHE, left, chained=False)
            found = [(i, f.held, f.length) for i, f in zip(batch, fetched, strict=True) if f.held is not None]
            try:
                await copied(partial(self._read_all, found, read, out), sum(length for _, _, length in found))
            finally:
                self._client.give_back([held for _, held, _ in found])
        return out

    @staticmethod
    def _read_all(found: Sequence[tuple[int, Held, int]], read: Read[T], out: list[T | None]) -> None:
        for i, held, length in found:
            out[i] = read(i, held.slot, length)


async def copied(copy: Callable[[], None], size: int) -> None:
    """``copy`` of ``size`` bytes has run, on a thread unless they are few. A cancelled caller is kept until then."""
    if size > AT_ONCE:
        await to_the_end(asyncio.to_thread(copy))
    else:
        copy()


def left_until(end: float) -> float:
    """Seconds until a time of the running loop's clock, not negative."""
    return max(0.0, end - asyncio.get_running_loop().time())


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]
