"""``mooncake store bench``: put and get throughput of one program against a live agent, by size and concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from rich.table import Table

from cli.console import err, out, print_json, table
from cli.store_link import Link, finish, linked, secret_option
from services.store.client import StoreClient, plain_namespace
from shared.blocks import KEY, Namespace
from shared.errors import ConfigError, MooncakeError, Unavailable
from shared.setting import parse_bytes

MOST_OBJECTS = 4096
SHARE = 2
"""The objects of a row take at most one SHARE-th of the pool: what is measured is not eviction."""

BODIES = 16
"""Different bytes; made before the clock runs."""

TIMEOUT = 60.0


@dataclass(frozen=True)
class Case:
    """``concurrency`` calls at one time, each of ``batch`` objects of ``size`` bytes, for ``seconds`` seconds."""

    size: int
    concurrency: int
    batch: int
    seconds: float


@click.command()
@click.option("--socket", default="@mooncake-store", envvar="MOONCAKE_SOCKET", show_default=True, help="The agent's.")
@click.option(
    "--size", "sizes", default="64KiB,1MiB", show_default=True, help="Bytes of an object; several with commas."
)
@click.option(
    "--concurrency", "depths", default="1,16", show_default=True, help="Calls at one time; several with commas."
)
@click.option("--batch", type=click.IntRange(1, 64), default=1, show_default=True, help="Objects of a call.")
@click.option("--seconds", type=click.FloatRange(0.01, 600), default=2.0, show_default=True, help="Of each row.")
@secret_option
@linked
def bench(link: Link, socket: str, sizes: str, depths: str, batch: int, seconds: float, as_json: bool) -> None:
    """Measure put and get of this machine's agent. What is put is removed again.

    Puts copy into the pool and gets copy out of it, as `services.store.client` does. On an agent that gives its whole
    pool to one namespace, objects go into that one, which may evict what is in it.
    """
    cases = [
        Case(size, depth, batch, seconds)
        for size in _numbers("--size", sizes)
        for depth in _numbers("--concurrency", depths)
    ]
    finish(_bench(link, socket, cases, as_json))


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [parse_bytes(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise click.BadParameter(f"{flag}: {error}") from None
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{flag}: {text!r} names no number of at least 1")
    return numbers


async def _bench(link: Link, socket: str, cases: list[Case], as_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    async with attached(link, socket, max(case.size for case in cases)) as client:
        for case in cases:
            rows += await measured(client, case)
    if as_json:
        print_json({"socket": socket, "rows": rows})
    else:
        out.print(_table(rows))
    return 0


@contextlib.asynccontextmanager
async def attached(link: Link, socket: str, size: int) -> AsyncIterator[StoreClient]:
    """A client whose slots take ``size`` bytes: of a namespace of our own, else of one that the agent has."""
    name = f"bench {os.getpid()}"
    mine = plain_namespace("mooncake store bench", size)
    try:
        client = await StoreClient.connect(socket, mine, owner_name=name, secret=link.secret)
    except ConfigError as error:
        theirs = await _namespace_of(link, socket, size)
        if theirs is None:
            raise ConfigError(f"{error.message}; and no namespace there has slots of {size} bytes") from None
        err.print("the agent has no room for a namespace of our own: objects go into one that it has", style="yellow")
        client = await StoreClient.connect(socket, theirs, owner_name=name, secret=link.secret)
    async with client:
        yield client


async def _namespace_of(link: Link, socket: str, size: int) -> Namespace | None:
    """The one with the smallest slots that are large enough, of the agent with this socket."""
    try:
        async with link.metadata() as metadata:
            agents = await metadata.agents()
    except Unavailable:
        return None
    slabs = [slab for agent in agents if agent.socket == socket for slab in agent.slabs]
    fitting = [slab.namespace for slab in slabs if slab.namespace.geometry.slot_bytes >= size]
    return min(fitting, key=lambda namespace: namespace.geometry.slot_bytes, default=None)


# -- one row -----------------------------------------------------------------------------------------------------


class Objects:
    """Keys and bytes of one row."""

    def __init__(self, size: int, count: int) -> None:
        seed, rng = os.urandom(KEY), np.random.default_rng()
        self.keys = [hashlib.sha256(seed + number.to_bytes(8, "big")).digest()[:KEY] for number in range(count)]
        self._bodies = [rng.bytes(size) for _ in range(BODIES)]

    def data(self, number: int) -> bytes:
        return self._bodies[number % BODIES]


async def measured(client: StoreClient, case: Case) -> list[dict[str, Any]]:
    """Rows of put, then get. Raises MooncakeError; ClickException for wrong bytes."""
    room = client.pool.slots // SHARE
    count = min(MOST_OBJECTS, room) // case.batch * case.batch
    if count < case.batch:
        raise ConfigError(f"the pool has {client.pool.slots} slots: too few for a batch of {case.batch}", field="batch")
    objects = Objects(case.size, count)
    stored: set[int] = set()

    async def put(first: int) -> None:
        numbers = range(first, first + case.batch)
        results = await client.put([(objects.keys[n], objects.data(n)) for n in numbers], TIMEOUT)
        if (error := next((result.error for result in results if result.error), None)) is not None:
            raise error
        stored.update(numbers)

    async def get(first: int) -> None:
        numbers = range(first, first + case.batch)
        for number, data in zip(numbers, await client.get([objects.keys[n] for n in numbers], TIMEOUT), strict=True):
            if data is not None and data != objects.data(number):
                raise click.ClickException(f"wrong bytes under {objects.keys[number].hex()}")

    async def clear() -> None:
        if stored:
            await client.remove([objects.keys[n] for n in sorted(stored)], TIMEOUT)
        stored.clear()

    firsts = list(range(0, count, case.batch))
    try:
        puts = await _timed(case, firsts, put, clear)
        if not stored:
            await put(0)
        gets = await _timed(case, [first for first in firsts if first in stored], get, None)
    finally:
        with contextlib.suppress(MooncakeError):
            await clear()
    return [_row("put", case, *puts), _row("get", case, *gets)]


async def _timed(
    case: Case,
    firsts: list[int],
    call: Callable[[int], Awaitable[None]],
    again: Callable[[], Awaitable[None]] | None,
) -> tuple[list[float], float]:
    """Seconds of each call, and all seconds that calls ran. Between two rounds of all calls it is done ``again``, which
    does not count."""
    took: list[float] = []
    spent, clock = 0.0, time.perf_counter

    async def work(mine: list[int], until: float) -> None:
        while mine and clock() < until:
            begin = clock()
            await call(mine.pop())
            took.append(clock() - begin)

    while spent < case.seconds:
        if again is not None:
            await again()
        left, begin = firsts[::-1], clock()
        tasks = [work(left, begin + case.seconds - spent) for _ in range(case.concurrency)]
        await asyncio.gather(*tasks)
        spent += clock() - begin
    return took, spent


def _row(what: str, case: Case, took: list[float], spent: float) -> dict[str, Any]:
    objects = len(took) * case.batch
    return {
        "what": what,
        "size": case.size,
        "concurrency": case.concurrency,
        "batch": case.batch,
        "calls": len(took),
        "objects_per_s": round(objects / spent, 1),
        "bytes_per_s": round(objects * case.size / spent),
        "p50_ms": round(1000 * float(np.percentile(took, 50)), 3),
        "p99_ms": round(1000 * float(np.percentile(took, 99)), 3),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    shown = table(("",), ("KiB", "concurrency", "batch", "objects/s", "MiB/s", "p50 ms", "p99 ms"))
    for row in rows:
        size, speed = f"{row['size'] / 1024:g}", f"{row['bytes_per_s'] / 2**20:.1f}"
        counts = [size, str(row["concurrency"]), str(row["batch"]), f"{row['objects_per_s']:.0f}", speed]
        shown.add_row(row["what"], *counts, f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}")
    return shown
