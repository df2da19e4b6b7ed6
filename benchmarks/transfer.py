"""Transfers between two processes beside the machine's limits, interleaved: memcpy and shm, raw sockets and tcp, tls.

``python -m benchmarks.transfer [--rounds N] [--streams N]``: each round moves every size once with every contender, at
the same place of the same buffers, and begins with another contender. CPU seconds are those of both processes.
The raw socket blocks whoever asks; the raw streams are as many as the engine's, on threads of their own, and are asked
from an event loop, as everything here is.
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
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from services.store.transfer.tls import Files, Tls
from shared.messages import Ref

MIB = 1 << 20
POOL = 256 * MIB
STREAMS = 2
SECRET = b"benchmark"
TARGET = Ref("target", 1)
RAW = struct.Struct("<?QQ")
SHARE = 2 * MIB
"""Raw streams share what is at least so much for each."""
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


async def serve(tls: str) -> None:
    pool = Pool()
    engine = Engine(TARGET, secret=SECRET, resolve=nobody, shm=own_address(), tls=_tls(tls))
    engine.register_local_memory(pool.view, name="pool", fd=pool.fd)
    await engine.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept_raw, args=(listener, pool), daemon=True).start()
    peer = engine.peer()
    print(json.dumps([peer.host, peer.port, peer.host_id, peer.shm, listener.getsockname()[1]]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await engine.close()


def own_address() -> str:
    """Where descriptors are passed: runs beside each other do not meet there."""
    return f"@mooncake-benchmark-{uuid4().hex}"


async def nobody(id: str) -> Peer:
    raise KeyError(id)


def _accept_raw(listener: socket.socket, pool: Pool) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve_raw, args=(sock, pool), daemon=True).start()


def _serve_raw(sock: socket.socket, pool: Pool) -> None:
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
    """``move(op, offset, size, count)`` moves ``count`` blocks of ``size`` bytes that lie end to end; ``target`` is the
    process at the other end."""

    name: str
    move: Move
    target: int
    seconds: dict[tuple[Op, int, int], list[float]] = field(default_factory=dict)
    cpu: dict[tuple[Op, int, int], float] = field(default_factory=dict)


def memcpy(pool: Pool) -> Move:
    other = Pool()

    async def move(op: Op, offset: int, size: int, count: int) -> None:
        end = offset + size * count
        np.copyto(pool.bytes[offset:end], other.bytes[offset:end])

    return move


class RawSocket:
    """One request at a time, blocking."""

    def __init__(self, pool: Pool, port: int) -> None:
        self._pool = pool
        self._sock = socket.create_connection(("127.0.0.1", port))
        tune(self._sock)
        self._byte = memoryview(bytearray(1))

    def move(self, op: Op, offset: int, length: int) -> None:
        view = self._pool.view[offset : offset + length]
        send_all(self._sock, [RAW.pack(op is Op.READ, offset, length)])
        if op is Op.READ:
            receive_all(self._sock, [view])
        else:
            send_all(self._sock, [view])
            receive_all(self._sock, [self._byte])


def raw(pool: Pool, port: int) -> Move:
    one = RawSocket(pool, port)

    async def move(op: Op, offset: int, size: int, count: int) -> None:
        one.move(op, offset, size * count)

    return move


def raw_streams(pool: Pool, port: int, streams: int) -> Move:
    """Equal shares, each on a socket and a thread of its own."""
    socks = [RawSocket(pool, port) for _ in range(streams)]
    threads = [ThreadPoolExecutor(1) for _ in range(streams)]

    async def move(op: Op, offset: int, size: int, count: int) -> None:
        loop, length = asyncio.get_running_loop(), size * count
        used = max(1, min(streams, length // SHARE))
        share = -(-length // used)
        places = [(at, min(share, length - at)) for at in range(0, length, share)]
        await asyncio.gather(
            *(
                loop.run_in_executor(thread, sock.move, op, offset + at, part)
                for thread, sock, (at, part) in zip(threads, socks, places, strict=False)
            )
        )

    return move


def transfer(engine: Engine) -> Move:
    async def move(op: Op, offset: int, size: int, count: int) -> None:
        places = range(offset, offset + size * count, size)
        results = await engine.transfer([Request(op, "pool", at, TARGET, "pool", at, size) for at in places], 30)
        assert all(result.status is Status.COMPLETED for result in results), results

    return move


# -- the run ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def target(tls: str = "") -> Iterator[tuple[int, list[Any]]]:
    """Its pid and its addresses; it ends when its input does. ``tls``: folder of the certificate that it shows."""
    command = [sys.executable, "-m", "benchmarks.transfer", "--serve", "--tls", tls]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as child:
        assert child.stdout is not None and child.stdin is not None
        yield child.pid, json.loads(child.stdout.readline())
        child.stdin.close()


def make_certificate(folder: Path) -> None:
    """One for both sides, that is its own authority."""
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=benchmark", "-days", "2"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", "req", "-x509", *kind, *files], check=True, capture_output=True)


def _tls(folder: str) -> Tls | None:
    cert, key = (str(Path(folder, name)) for name in ("cert.pem", "key.pem"))
    return Tls(Files(cert, key, cert)) if folder else None


@contextlib.asynccontextmanager
async def engines(
    pool: Pool, addresses: list[Any], names: Sequence[str] = ("shm", "tcp"), streams: int = STREAMS, tls: str = ""
) -> AsyncIterator[dict[str, Engine]]:
    """Running engines by the one transport of each, ``pool`` registered as "pool"; the target is at ``addresses``."""
    host, port, host_id, shm, _ = addresses

    async def resolve(id: str) -> Peer:
        return Peer(TARGET, host, port, host_id, shm)

    async with contextlib.AsyncExitStack() as stack:
        running = {}
        for number, name in enumerate(names):
            policy = TransportPolicy.parse(f"require:{name}")
            own = Ref(name, number)
            engine = Engine(
                own,
                secret=SECRET,
                resolve=resolve,
                policy=policy,
                shm=own_address(),
                streams=streams,
                tls=_tls(tls),
            )
            engine.register_local_memory(pool.view, name="pool", fd=pool.fd)
            await engine.start()
            stack.push_async_callback(engine.close)
            running[name] = engine
        yield running


async def measure(rounds: int, streams: int) -> list[report.Row]:
    pool = Pool()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-tls-"))
        make_certificate(Path(folder))
        plain, addresses = stack.enter_context(target())
        sealed, tls_addresses = stack.enter_context(target(folder))
        ours = await stack.enter_async_context(engines(pool, addresses, streams=streams))
        tls = await stack.enter_async_context(engines(pool, tls_addresses, ["tcp"], streams, folder))
        contenders = [
            Contender("memcpy", memcpy(pool), plain),
            Contender("raw socket", raw(pool, addresses[-1]), plain),
            Contender(f"{streams} raw streams", raw_streams(pool, addresses[-1], streams), plain),
            *(Contender(name, transfer(engine), plain) for name, engine in ours.items()),
            Contender("tcp, TLS", transfer(tls["tcp"]), sealed),
        ]
        await _run(contenders, rounds)
    return _rows(contenders)


async def _run(contenders: list[Contender], rounds: int) -> None:
    for contender in contenders:  # maps every page once
        for op in Op:
            await contender.move(op, 0, 4 * MIB, POOL // (4 * MIB))
    for turn in range(rounds):
        first = turn % len(contenders)
        for size, count in CASES:
            offset = turn * 37 * MIB % (POOL - size * count) // 4096 * 4096
            for op in Op:
                for contender in contenders[first:] + contenders[:first]:
                    await _sample(contender, (op, size, count), offset)


async def _sample(contender: Contender, case: tuple[Op, int, int], offset: int) -> None:
    op, size, count = case
    cpu, start = _cpu(contender.target) + time.process_time(), time.perf_counter()
    await contender.move(op, offset, size, count)
    contender.seconds.setdefault(case, []).append(time.perf_counter() - start)
    contender.cpu[case] = contender.cpu.get(case, 0.0) + time.process_time() + _cpu(contender.target) - cpu


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
    parser.add_argument("--streams", type=int, default=STREAMS, help=f"connections to the target (default {STREAMS})")
    parser.add_argument("--name", default="transfer", help="of the file in benchmarks/results (default transfer)")
    parser.add_argument("--tls", default="", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.tls))
    else:
        report.write(options.name, asyncio.run(measure(options.rounds, options.streams)))


if __name__ == "__main__":
    main()
