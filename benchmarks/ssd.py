"""The SSD tier: hits by tier and requests per second with a working set of four times the DRAM, with it and without;
O_DIRECT beside the page cache; what heavy demotion does to the Unix socket and to the heartbeat's thread.

``python -m benchmarks.ssd [--rounds N] [--dram MIB] [--trace FILE] [--folder FOLDER]``
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.processes import cpu_seconds
from benchmarks.ssd_processes import BLOCK, NAMESPACE, node, putting
from services.store.client import StoreClient
from shared.engines.base import Kind, Owner, PoolClass

MIB = 1 << 20
FACTOR = 4
"""Working set over DRAM."""

CHAIN = 16
"""Blocks of a prompt of the Zipf row."""

COMPUTE = 0.001
"""Seconds that computing a block takes here: what a hit saves."""

OWNER = Owner("bench")
Chain = list[bytes]


def key(*names: object) -> bytes:
    return hashlib.sha256(repr(names).encode()).digest()[:16]


# -- requests ----------------------------------------------------------------------------------------------------


def zipf(blocks: int, requests: int, seed: int) -> Iterator[Chain]:
    """First every prompt once, then by rank: the i-th with a weight of 1/i."""
    chains = [[key(seed, c, i) for i in range(CHAIN)] for c in range(blocks // CHAIN)]
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(chains) + 1)
    yield from (chains[c] for c in rng.permutation(len(chains)))
    yield from (chains[c] for c in rng.choice(len(chains), requests, p=weights / weights.sum()))


def trace(path: Path, blocks: int) -> Iterator[Chain]:
    """Requests of a public trace in their order, until they have named so many blocks."""
    seen: set[int] = set()
    for line in path.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        seen.update(ids)
        if len(seen) > blocks:
            return
        yield [key(path.name, i) for i in ids]


@dataclass
class Outcome:
    """Of the requests that count: blocks, those found in DRAM and on SSD; seconds."""

    requests: int = 0
    blocks: int = 0
    dram: int = 0
    ssd: int = 0
    skipped: int = 0
    wall: float = 0.0
    cpu: float = 0.0


async def replay(client: StoreClient, pid: int, chains: Sequence[Chain], first: int) -> Outcome:
    """``first`` requests only fill. Hits are prefixes, as for an engine: what follows on a miss is computed."""
    out, view = Outcome(), np.memmap(client.pool.path, np.uint8, "r+", client.pool.offset)
    before = await client.stats()
    began, cpu = time.monotonic(), cpu_seconds(pid)
    for number, chain in enumerate(chains):
        if number == first:
            before, began, cpu = await client.stats(), time.monotonic(), cpu_seconds(pid)
        leases = await client.lease(chain, OWNER, PoolClass.PREFILL)
        lead = next((i for i, one in enumerate(leases) if one is None), len(leases))
        await client.release([one for one in leases if one is not None])
        if lead < len(chain):
            await compute(client, view, chain, lead)
        if number >= first:
            out.requests += 1
            out.blocks += len(chain)
            out.dram += lead
    after = await client.stats()
    out.wall, out.cpu = time.monotonic() - began, cpu_seconds(pid) - cpu
    out.ssd = min(int(after["ssd_hits"] - before["ssd_hits"]), out.dram)
    out.dram -= out.ssd
    out.skipped = int(after["ssd_skipped"] - before["ssd_skipped"])
    return out


async def compute(client: StoreClient, view: np.memmap[tuple[int], np.dtype[np.uint8]], chain: Chain, at: int) -> None:
    """Eight blocks at a time, as chunks of a prefill would be."""
    for first in range(at, len(chain), 8):
        keys = chain[first : first + 8]
        held = await client.reserve(keys, OWNER, PoolClass.PREFILL, 30.0)
        new = [first + i for i, one in enumerate(held) if one.kind is Kind.NEW]
        for i in new:
            view[held[i - first].slot * client.pool.stride :][:BLOCK] = np.frombuffer(
                chain[i] * (BLOCK // 16), np.uint8
            )
        await asyncio.sleep(COMPUTE * len(new))
        for i in new:
            await client.commit([held[i - first]], chain[i - 1] if i else b"", [chain[i]])
        await client.release(held)


async def serve(chains: Sequence[Chain], first: int, dram: int, folder: str) -> Outcome:
    with node(dram, folder, 2 * FACTOR * dram if folder else 0) as agent:
        async with await StoreClient.connect(agent.socket, NAMESPACE) as client:
            return await replay(client, agent.pid, chains, first)


async def workloads(rounds: int, dram: int, files: Iterable[Path], folder: Path) -> list[report.Row]:
    blocks, rows = FACTOR * dram // BLOCK, list[report.Row]()
    for path in (None, *files):
        name = "Zipf" if path is None else path.stem.replace("_", " ")
        outcomes: dict[str, list[Outcome]] = {"DRAM and SSD": [], "DRAM": []}
        for turn in range(rounds):
            chains = list(trace(path, blocks) if path else zipf(blocks, 2 * blocks // CHAIN, turn))
            first = 0 if path else blocks // CHAIN
            for contender, found in outcomes.items():
                with tempfile.TemporaryDirectory(dir=folder) as where:
                    found.append(await serve(chains, first, dram, where if contender != "DRAM" else ""))
        for contender, found in outcomes.items():
            rows += workload_rows(name, contender, found)
    return rows


def workload_rows(name: str, contender: str, found: Sequence[Outcome]) -> Iterator[report.Row]:
    cpu = sum(o.cpu for o in found) / len(found)
    note = f"{found[0].requests} requests, {found[0].blocks} blocks"
    for what, samples in (
        ("hits in DRAM", [100 * o.dram / o.blocks for o in found]),
        ("hits on SSD", [100 * o.ssd / o.blocks for o in found]),
        ("lost for lack of disk time", [100 * o.skipped / o.blocks for o in found]),
    ):
        yield report.row(f"{name}: {what}", contender, samples, "% of blocks", note=note)
    rates = [o.requests / o.wall for o in found]
    yield report.row(f"{name}: requests", contender, rates, "1/s", cpu, f"computing a block: {COMPUTE * 1e3:g} ms")
    yield report.row(f"{name}: wall", contender, [o.wall for o in found], "s", cpu)


# -- the disk ----------------------------------------------------------------------------------------------------


@dataclass
class Moved:
    speeds: list[float] = field(default_factory=list)
    cpu: float = 0.0


def disk(rounds: int, folder: Path) -> Iterator[report.Row]:
    """One call a block, on a preallocated file; what went through the page cache is then written out, and read cold."""
    size = 256 * MIB
    with mmap.mmap(-1, size) as memory:
        memory.write(os.urandom(MIB) * (size // MIB))
        for block in (64 << 10, 512 << 10, 4 * MIB):
            found = {(way, name): Moved() for way in ("write", "read") for name in ("O_DIRECT", "page cache")}
            for _ in range(rounds):
                for name in ("O_DIRECT", "page cache"):
                    for way, (seconds, cpu) in moved(folder, name == "O_DIRECT", memory, block).items():
                        found[way, name].speeds.append(size / seconds / (1 << 30))
                        found[way, name].cpu += cpu / rounds
            for (way, name), one in found.items():
                yield report.row(f"{way} blocks of {block >> 10} KiB", name, one.speeds, "GiB/s", one.cpu)


def moved(folder: Path, direct: bool, memory: mmap.mmap, block: int) -> dict[str, tuple[float, float]]:
    """(seconds, CPU seconds) by way."""
    out: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as where, ExitStack() as stack:
        fd = os.open(Path(where) / "file", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, len(memory))
        view = stack.enter_context(memoryview(memory))
        for way in ("write", "read"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            began, cpu = time.monotonic(), time.process_time()
            for at in range(0, len(memory), block):
                with view[at : at + block] as piece:
                    os.pwritev(fd, [piece], at) if way == "write" else os.preadv(fd, [piece], at)
            if way == "write":
                os.fdatasync(fd)
            out[way] = time.monotonic() - began, time.process_time() - cpu
    return out


# -- the agent under demotion ------------------------------------------------------------------------------------


async def waits(seconds: float, dram: int, folder: Path) -> list[report.Row]:
    """Round trips of an engine that only asks, while another writes new blocks as fast as it can."""
    rows = list[report.Row]()
    for contender, tier, load in (("idle", False, False), ("puts to DRAM", False, True), ("and to SSD", True, True)):
        with ExitStack() as stack:
            where = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            agent = stack.enter_context(node(dram, where if tier else "", 2 * FACTOR * dram if tier else 0))
            with putting(agent.socket) if load else nullcontext():
                trips = await round_trips(agent.socket, seconds)
            late = agent.end()
        rows += wait_rows("round trip of the Unix socket", contender, trips)
        rows += wait_rows("lateness of a thread that sleeps 10 ms", contender, late)
    return rows


def wait_rows(what: str, contender: str, waits: Sequence[float]) -> Iterator[report.Row]:
    micros = sorted(1e6 * wait for wait in waits)
    for name, at in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("most", 1.0)):
        value = micros[min(int(at * len(micros)), len(micros) - 1)]
        yield report.Row(f"{what}, {name}", contender, value, "us", len(micros))


async def round_trips(socket: str, seconds: float) -> list[float]:
    out, until = list[float](), time.monotonic() + seconds
    async with await StoreClient.connect(socket, NAMESPACE) as client:
        while time.monotonic() < until:
            began = time.monotonic()
            await client.contains([b"k" * 16])
            out.append(time.monotonic() - began)
            await asyncio.sleep(0.001)
    return out


# -- the run -----------------------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace) -> list[report.Row]:
    dram = options.dram * MIB
    with tempfile.TemporaryDirectory(dir=options.folder or None) as where:
        folder = Path(where)
        rows = list(disk(options.rounds, folder))
        rows += await waits(options.seconds, dram, folder)
        rows += await workloads(options.rounds, dram, options.trace, folder)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ssd", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each row (default 3)")
    parser.add_argument("--dram", type=int, default=64, help="MiB of the agent's pool (default 64)")
    parser.add_argument("--seconds", type=float, default=10.0, help="that round trips are taken (default 10)")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a public trace (JSON lines); repeat")
    parser.add_argument("--folder", default="", help="on the disk to be measured (default: that of temporary files)")
    report.write("ssd", asyncio.run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
