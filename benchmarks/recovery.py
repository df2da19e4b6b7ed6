"""``make recovery``: seconds until index, mirror and inventories agree again after a loss under load; wrong reads.

Redis is flushed, killed and started empty, and failed over to a copy of five seconds before; an agent is killed and
started again. Inventories are asked of the agents themselves, key by key.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from benchmarks import report
from benchmarks.stress.board import Count
from benchmarks.stress.client import SPACE
from benchmarks.stress.content import key_of
from benchmarks.stress.fleet import Fleet, Options
from services.store.client import StoreClient, plain_namespace
from shared.errors import MooncakeError, PeerGone
from shared.index.lookup import lookup
from shared.index.mirroring import IndexMirror
from shared.metadata import Metadata
from shared.records import AgentRecord

OPTIONS = Options(
    writers=2, readers=2, holders=0, evictors=0, landers=1, keys=1024, slots=256, block_bytes=4096, depth=1
)
STALE = 5.0
"""Seconds that the copy of a failed over Redis is behind."""

LATER = 0.1
"""Seconds after which what differs is looked at again: changes take some milliseconds to the index."""

PAUSE = 0.02
PATIENCE = 120.0
SETTLED = 3
"""Looks in a row that must find no difference before the next loss."""


class Observer:
    """Asks every agent what it has of the working set, and Redis and a mirror what they think it has."""

    def __init__(self, fleet: Fleet, metadata: Metadata, mirror: IndexMirror) -> None:
        self._fleet = fleet
        self._metadata = metadata
        self._mirror = mirror
        self._space = plain_namespace(SPACE, fleet.options.block_bytes)
        self._keys = [key_of(SPACE, number) for number in range(fleet.options.keys)]
        self._clients: dict[str, StoreClient] = {}

    async def differs(self) -> tuple[bool, bool]:
        """(index, mirror) against the inventories: is there a key that differs now and a moment later? True also while
        an agent is not there, or not as the registered one."""
        try:
            first = await self._look(self._keys)
            keys = list(dict.fromkeys(key for found in first for key in found))
            if not keys:
                return False, False
            await asyncio.sleep(LATER)
            again = await self._look(keys)
        except MooncakeError:
            return True, True
        index, mirror = (bool(set(one) & set(two)) for one, two in zip(first, again, strict=True))
        return index, mirror

    async def _look(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Keys of which (index, mirror) say something else than an agent that said the same before and after."""
        records = await self._metadata.agents()
        if len(records) < len(self._fleet.agents):
            raise PeerGone("an agent is not registered")
        self._mirror.living([record.code for record in records])
        before = [await (await self._client(record)).contains(keys) for record in records]
        places = await lookup(self._metadata.link, self._fleet.mesh, keys)
        mirrored = [self._mirrored(record.code, keys) for record in records]
        after = [await (await self._client(record)).contains(keys) for record in records]
        index: list[bytes] = []
        mirror: list[bytes] = []
        for record, was, seen, now in zip(records, before, mirrored, after, strict=True):
            for key, there, copy, still, place in zip(keys, was, seen, now, places, strict=True):
                if there == still != (record.code in place):
                    index.append(key)
                if there == still != copy:
                    mirror.append(key)
        return index, mirror

    def _mirrored(self, code: bytes, keys: Sequence[bytes]) -> list[bool]:
        column = self._mirror.columns.get(code)
        return [column is not None and self._mirror.prefix.tier(column, key) >= 0 for key in keys]

    async def _client(self, record: AgentRecord) -> StoreClient:
        """Attached to just this incarnation. Raises MooncakeError."""
        client = self._clients.get(record.ref.id)
        if client is None or client.closed:
            if client is not None:
                await client.close()
            client = await StoreClient.connect(record.socket, self._space, owner_name="observer", timeout=1.0)
            self._clients[record.ref.id] = client
        if client.agent != record.ref:
            raise PeerGone(f"{record.ref.id} is another incarnation than the registered one")
        return client

    async def close(self) -> None:
        for client in self._clients.values():
            with contextlib.suppress(MooncakeError):
                await client.close()


@asynccontextmanager
async def observing(fleet: Fleet) -> AsyncIterator[Observer]:
    async with AsyncExitStack() as stack:
        metadata = await stack.enter_async_context(Metadata(fleet.redis.url, fleet.mesh))
        mirror = await stack.enter_async_context(IndexMirror(fleet.redis.url, fleet.mesh))
        observer = Observer(fleet, metadata, mirror)
        stack.push_async_callback(observer.close)
        yield observer


Loss = Callable[[Fleet], Awaitable[float]]
"""Does it, and returns when it had happened (``time.monotonic``)."""


async def flushed(fleet: Fleet) -> float:
    await asyncio.to_thread(fleet.flush_redis)
    return time.monotonic()


async def restarted(fleet: Fleet) -> float:
    await asyncio.to_thread(fleet.restart_redis)
    return time.monotonic()


async def failed_over(fleet: Fleet) -> float:
    await asyncio.to_thread(fleet.save_redis)
    await asyncio.sleep(STALE)
    await asyncio.to_thread(fleet.restart_redis, True)
    return time.monotonic()


async def agent_killed(fleet: Fleet) -> float:
    """Started again at once: the time it takes to start counts."""
    begin = time.monotonic()
    fleet.agents[0].kill()
    fleet.start(fleet.agents[0])
    return begin


LOSSES: dict[str, Loss] = {
    "Redis flushed": flushed,
    "Redis killed, started empty": restarted,
    "Redis failed over to a stale copy": failed_over,
    "agent killed, started again": agent_killed,
}


async def measure(rounds: int) -> list[report.Row]:
    seconds: dict[tuple[str, str], list[float]] = {}
    checked = dict.fromkeys(LOSSES, 0)
    wrong = dict.fromkeys(LOSSES, 0)
    with Fleet(OPTIONS) as fleet:
        async with observing(fleet) as observer:
            for _ in range(rounds):
                for name, loss in LOSSES.items():
                    await agreed(observer, time.monotonic())
                    reads, mismatches = (fleet.board.total(count) for count in (Count.HITS, Count.MISMATCHES))
                    begin = await loss(fleet)
                    for what, took in (await agreed(observer, begin)).items():
                        seconds.setdefault((name, what), []).append(took)
                    checked[name] += fleet.board.total(Count.HITS) - reads
                    wrong[name] += fleet.board.total(Count.MISMATCHES) - mismatches
        crashes = [process.name for process in fleet.processes if process.ended_by_itself()]
    rows = [report.row(name, what, samples, "s") for (name, what), samples in seconds.items()]
    for name in LOSSES:
        note = f"of {checked[name]} blocks read and checked meanwhile" + (f"; ended: {crashes}" if crashes else "")
        rows.append(report.Row(name, "wrong reads", wrong[name], "blocks", rounds, note=note))
    return rows


async def agreed(observer: Observer, begin: float) -> dict[str, float]:
    """Seconds from ``begin`` to the first look of the row of agreeing ones that ended it. Raises TimeoutError."""
    since: dict[str, float] = {}
    good = 0
    while good < SETTLED:
        at = time.monotonic()
        if at > begin + PATIENCE:
            raise TimeoutError(f"they do not agree after {PATIENCE:g} s")
        differs = dict(zip(("index", "mirror"), await observer.differs(), strict=True))
        for what, bad in differs.items():
            if bad:
                since.pop(what, None)
            else:
                since.setdefault(what, at)
        good = 0 if any(differs.values()) else good + 1
        await asyncio.sleep(PAUSE)
    return {what: at - begin for what, at in since.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="losses of each kind (default 5)")
    report.write("recovery", asyncio.run(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
