"""Transfers between two processes beside the machine's limits, interleaved: memcpy and shm, a raw socket and tcp.

``python -m benchmarks.transfer [--rounds N]``: each round moves every size once with every contender, at the same
place of the same buffers. CPU seconds are those of both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from benchmarks import report
from services.store.transfer.base import Op, Peer, Request, Status
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.sockets import receive_all, send_all, tune
from shared.messages import Ref

MIB = 1 << 20
POOL = 256 * MIB
SECRET = b"benchmark"
TARGET = Ref("target", 1)
RAW = struct.Struct("<?QQ")
CASES = ((128 << 10, 1), (MIB, 1), (4 * MIB, 1), (16 * MIB, 1), (16 << 10, 256))


class Pool:
    """A shared-memory buffer, every page of it touched."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("benchmark")
        os.ftruncate(self.fd, POOL)
        self.map = mmap.mmap(self.fd, POOL)
        self.view = memoryview(self.map)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.bytes.fill(1)


# -- the target process ----------------------------------------------------------------------------------------


async def serve() -> None:
    pool = Pool()
    engine = Engine(TARGET, secret=SECRET, resolve=nobody, shm=own_address())
    engine.register_local_memory(pool.view, name="pool", fd=pool.fd)
    await engine.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_raw, args=(listener, pool), daemon=True).start()
    peer = engine.peer()
    print(json.dumps([peer.host, peer.port, peer.host_id, peer.shm, listener.getsockname()[1]]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await engine.close()


def own_address() -> str:
    """Where descriptors are passed: runs beside each other do not meet there."""
    return f"@mooncake-benchmark-{uuid4().hex}"


async def nobody(id: str) -> Peer:
    raise KeyError(id)


def _serve_raw(listener: socket.socket, pool: Pool) -> None:
    sock, _ = listener.accept()
    tune(sock)
    head = memoryview(bytearray(RAW.size))
    with contextlib.suppress(Exception):  # the other side ends the connection
        while True:
            receive_all(sock, [head])
            reading, offset, length = RAW.unpack(head)
            view = pool.view[offset : offset + length]
            if reading:
                send_all(sock, [view])
            else:
                receive_all(sock, [view])
                send_all(sock, [b"k"])


# -- contenders ------------------------------------------------------------------------------------------------

Move = Callable[[Op, int, int, int], Awaitable[None]]


@dataclass
class Contender:
    """``move(op, offset, size, count)`` moves ``count`` blocks of ``size`` bytes that lie end to end."""

    name: str
    move: Move
    seconds: dict[tuple[Op, int, int], list[float]] = field(default_factory=dict)
    cpu: dict[tuple[Op, int, int], float] = field(default_factory=dict)


def memcpy(pool: Pool) -> Move:
    other = Pool()

    async def move(op: Op, offset: int, size: int, count: int) -> None:
        end = offset + size * count
        np.copyto(pool.bytes[offset:end], other.bytes[offset:end])

    return move


def raw(pool: Pool, port: int) -> Move:
    sock = socket.create_connection(("127.0.0.1", port))
    tune(sock)
    byte = memoryview(bytearray(1))

    async def move(op: Op, offset: int, size: int, count: int) -> None:
        view = pool.view[offset : offset + size * count]
        send_all(sock, [RAW.pack(op is Op.READ, offset, len(view))])
        if op is Op.READ:
            receive_all(sock, [view])
        else:
            send_all(sock, [view])
            receive_all(sock, [byte])

    return move


def transfer(engine: Engine) -> Move:
    async def move(op: Op, offset: int, size: int, count: int) -> None:
        places = range(offset, offset + size * count, size)
        results = await engine.transfer([Request(op, "pool", at, TARGET, "pool", at, size) for at in places], 30)
        assert all(result.status is Status.COMPLETED for result in results), results

    return move


# -- the run ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def target() -> Iterator[tuple[int, list[Any]]]:
    """Its pid and its addresses; it ends when its input does."""
    command = [sys.executable, "-m", "benchmarks.transfer", "--serve"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None and child.stdin is not None
        yield child.pid, json.loads(child.stdout.readline())
        child.stdin.close()


@contextlib.asynccontextmanager
async def engines(pool: Pool, addresses: list[Any]) -> AsyncIterator[dict[str, Engine]]:
    """Running engines by the one transport of each, ``pool`` registered as "pool"; the target is at ``addresses``."""
    host, port, host_id, shm, _ = addresses

    async def resolve(id: str) -> Peer:
        return Peer(TARGET, host, port, host_id, shm)

    async with contextlib.AsyncExitStack() as stack:
        running = {}
        for number, name in enumerate(("shm", "tcp")):
            policy = TransportPolicy.parse(f"require:{name}")
            own = Ref(name, number)
            engine = Engine(own, secret=SECRET, resolve=resolve, policy=policy, shm=own_address())
            engine.register_local_memory(pool.view, name="pool", fd=pool.fd)
            await engine.start()
            stack.push_async_callback(engine.close)
            running[name] = engine
        yield running


async def measure(rounds: int, child: int, addresses: list[Any]) -> list[report.Row]:
    pool = Pool()
    contenders = [Contender("memcpy", memcpy(pool)), Contender("raw socket", raw(pool, addresses[-1]))]
    async with engines(pool, addresses) as running:
        contenders += [Contender(name, transfer(engine)) for name, engine in running.items()]
        await _run(contenders, rounds, child)
    return _rows(contenders)


async def _run(contenders: list[Contender], rounds: int, child: int) -> None:
    for contender in contenders:  # maps every page once
        for op in Op:
            await contender.move(op, 0, 4 * MIB, POOL // (4 * MIB))
    for turn in range(rounds):
        for size, count in CASES:
            offset = turn * 37 * MIB % (POOL - size * count) // 4096 * 4096
            for op in Op:
                for contender in contenders:
                    await _sample(contender, (op, size, count), offset, child)


async def _sample(contender: Contender, case: tuple[Op, int, int], offset: int, child: int) -> None:
    op, size, count = case
    cpu, start = time.process_time() + _cpu(child), time.perf_counter()
    await contender.move(op, offset, size, count)
    contender.seconds.setdefault(case, []).append(time.perf_counter() - start)
    contender.cpu[case] = contender.cpu.get(case, 0.0) + time.process_time() + _cpu(child) - cpu


def _cpu(pid: int) -> float:
    """Seconds of CPU of another process, all its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _rows(contenders: list[Contender]) -> list[report.Row]:
    rows = []
    for size, count in CASES:
        for op in Op:
            what = f"{op.value} {size >> 10} KiB" + (f" x {count}" if count > 1 else "")
            for contender in contenders:
                seconds = contender.seconds[op, size, count]
                speeds = [size * count / s / (1 << 30) for s in seconds]
                cpu = contender.cpu[op, size, count] / len(seconds)
                rows.append(report.row(what, contender.name, speeds, "GiB/s", cpu))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="samples of each row (default 20)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    else:
        with target() as (pid, addresses):
            rows = asyncio.run(measure(options.rounds, pid, addresses))
        report.write("transfer", rows)


if __name__ == "__main__":
    main()
