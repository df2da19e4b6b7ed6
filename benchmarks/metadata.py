"""Metadata of blocks: bytes in agent, Redis and conductor; time to index, resync and publish anew after a flush.

``python -m benchmarks.metadata [--blocks N]``: one agent's publisher and a conductor's mirror, each in a process of its
own, over an embedded Redis. A pause is the most CPU time that one turn of the event loop takes: neighbours do not
count.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import redis

from benchmarks import report
from benchmarks.index_load import CHAIN, messages, random_chains, resident
from services.store.pool import Pool
from shared.blocks import KEY, split_keys
from shared.embedded import RedisServer
from shared.engines.base import Owner, PoolClass
from shared.index import code
from shared.index.mirroring import IndexMirror
from shared.index.publishing import IndexPublisher

MESH = "bench"
AGENT = code(1)
PORTION = 1 << 15
"""Blocks that are committed before Redis is waited for: what a busy agent commits in seconds."""

YIELD = 256
"""Blocks that are committed in one turn of the loop."""

PATIENCE = 1800.0
LOOK = 0.0005
POOL = 200_000


class Pauses:
    """The longest stretch of CPU time that this thread took between two looks."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            begin = time.thread_time()
            await asyncio.sleep(LOOK)
            self.longest = max(self.longest, time.thread_time() - begin)


@asynccontextmanager
async def watched() -> AsyncIterator[Pauses]:
    pauses = Pauses()
    task = asyncio.create_task(pauses.watch())
    try:
        yield pauses
    finally:
        task.cancel()


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if look():
                return
            await asyncio.sleep(0.01)


def say(**found: float) -> None:
    print(json.dumps(found), flush=True)


def heard() -> Coroutine[Any, Any, str]:
    return asyncio.to_thread(sys.stdin.readline)


# -- the processes -----------------------------------------------------------------------------------------------


async def agent(url: str, blocks: int) -> None:
    """Indexes; says so; then, told that Redis was flushed, says when it is all there again."""
    chains = random_chains(blocks)
    gc.collect()
    before = resident()
    async with IndexPublisher(url, MESH, AGENT) as publisher, watched() as pauses:
        begin, cpu, waiting = time.monotonic(), time.process_time(), 0
        for parent, keys in messages(chains):
            publisher.committed(parent, split_keys(keys))
            waiting += len(keys) // KEY
            if waiting % YIELD == 0:
                await asyncio.sleep(0)
            if waiting >= PORTION:
                await publisher.flushed(PATIENCE)
                waiting = 0
        await publisher.flushed(PATIENCE)
        took, spent = time.monotonic() - begin, time.process_time() - cpu
        say(seconds=took, cpu=spent, bytes=(resident() - before) / publisher.blocks, pause=pauses.longest)
        await heard()
        pauses.longest, begin, cpu = 0.0, time.monotonic(), time.process_time()
        republished = publisher.republished
        await until(lambda: publisher.republished > republished)
        await until(lambda: publisher.synced)
        say(seconds=time.monotonic() - begin, cpu=time.process_time() - cpu, pause=pauses.longest)
        await heard()


async def mirror(url: str, blocks: int) -> None:
    """Reads all of it, and says so."""
    gc.collect()
    before = resident()
    async with IndexMirror(url, MESH) as copy, watched() as pauses:
        copy.living([AGENT])

        def complete() -> bool:
            return copy.synced and sum(copy.summary()["blocks"].values()) >= blocks

        begin, cpu = time.monotonic(), time.process_time()
        await until(complete)
        took, spent = time.monotonic() - begin, time.process_time() - cpu
        say(seconds=took, cpu=spent, bytes=(resident() - before) / blocks, pause=pauses.longest)


async def pool(url: str, blocks: int) -> None:
    """What a slot with a block in it weighs in an agent, besides what its publisher keeps."""
    keys = [key for chain in random_chains(POOL) for key in split_keys(chain)]
    gc.collect()
    before = resident()
    slots = Pool(len(keys), lambda slot: True)
    for at in range(0, len(keys), CHAIN):
        part = keys[at : at + CHAIN]
        held = slots.reserve(part, 1, Owner("bench"), PoolClass.CACHE, 0) or []
        slots.commit(1, [h.hold for h in held], b"", part, [1] * len(part))
        slots.release(1, [h.hold for h in held])
        slots.settled.clear()
    say(bytes=(resident() - before) / len(keys))


ROLES = {"agent": agent, "mirror": mirror, "pool": pool}


# -- the run -----------------------------------------------------------------------------------------------------


class Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def hear(self) -> dict[str, float]:
        assert self._process.stdout is not None
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()


@contextmanager
def child(role: str, url: str, blocks: int) -> Iterator[Child]:
    argv = [sys.executable, "-m", "benchmarks.metadata", "--role", role, "--url", url, "--blocks", str(blocks)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process)
        finally:
            process.kill()


def measure(blocks: int) -> list[report.Row]:
    blocks = CHAIN * -(-blocks // CHAIN)
    rows: list[report.Row] = []
    note = f"{blocks} blocks"

    def add(what: str, found: dict[str, float]) -> None:
        rows.append(report.row(f"{what}: seconds", "mooncake", [found["seconds"]], "s", found["cpu"], note))
        rows.append(report.row(f"{what}: longest pause of its loop", "mooncake", [1000 * found["pause"]], "ms"))

    with child("pool", "", 0) as only:
        rows.append(report.row("agent: bytes of a block in the pool", "mooncake", [only.hear()["bytes"]], "B"))
    with RedisServer() as server, redis.Redis.from_url(server.url) as link:
        before = used(link)
        with child("agent", server.url, blocks) as publisher:
            found = publisher.hear()
            add("index", found)
            rows.append(report.row("agent: bytes of a block in the publisher", "mooncake", [found["bytes"]], "B"))
            weight = (used(link) - before) / blocks
            rows.append(report.row("Redis: bytes of a block, streams included", "mooncake", [weight], "B"))
            with child("mirror", server.url, blocks) as copy:
                found = copy.hear()
                add("resync by a cold mirror", found)
                rows.append(report.row("conductor: bytes of a block in the mirror", "mooncake", [found["bytes"]], "B"))
            link.flushall()
            publisher.tell()
            add("publish anew after a flush", publisher.hear())
    return rows


def used(link: redis.Redis) -> int:
    memory: Any = link.info("memory")
    return int(memory["used_memory"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metadata", description=__doc__)
    parser.add_argument("--blocks", type=int, default=2_000_000, help="indexed (default 2,000,000)")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        asyncio.run(ROLES[options.role](options.url, options.blocks))
    else:
        report.write("metadata", measure(options.blocks))


if __name__ == "__main__":
    main()
