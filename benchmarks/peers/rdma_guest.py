"""In the RDMA guest: WRITEs of this project's engine beside ``ib_write_bw``, round by round, over the same two devices.

Prints one JSON line: for each case the MiB/s of both in each round, and user CPU seconds and work requests of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from benchmarks.transfer import SECRET, TARGET, Pool, nobody
from services.store.transfer.base import Op, Peer, Request, Status
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.rdma.queue_pair import QueuePair, Work
from shared.messages import Ref

HERE, THERE, THERE_ADDRESS = "rxe0", "rxe1", "10.77.0.2"
KIB, MIB = 1 << 10, 1 << 20
CASES = ((16 * KIB, 512), (64 * KIB, 512), (MIB, 48))
"""(bytes of a request, how many in a batch)."""
APART = 2
"""Requests lie so many times their size apart, so that none is carried together with the next."""
TIMEOUT = 120.0
DURATION, MARGIN = 4, 1
ITERATIONS = re.compile(r"^\s*(\d+)\s+(\d+)\s+[\d.]+\s+[\d.]+\s", re.MULTILINE)
"""Of perftest's table: bytes, iterations. Its own speed is wrong where /proc/cpuinfo tells no clock rate, as here."""


def engine(ref: Ref, peers: dict[str, Peer], device: str) -> Engine:
    async def resolve(id: str) -> Peer:
        return peers[id] if id in peers else await nobody(id)

    policy = TransportPolicy.parse("require:rdma")
    return Engine(ref, secret=SECRET, resolve=resolve, policy=policy, rdma_devices=(device,), connect_timeout=20.0)


async def serve() -> None:
    pool, target = Pool(), engine(TARGET, {}, THERE)
    target.register_local_memory(pool.view, name="pool", fd=pool.fd)
    await target.start()
    peer = target.peer()
    print(json.dumps([peer.host, peer.port, peer.host_id, peer.shm]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await target.close()


@contextlib.asynccontextmanager
async def mover() -> AsyncIterator[Engine]:
    """Our end, its pool registered; the target is a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.rdma_guest", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        line = await asyncio.get_running_loop().run_in_executor(None, child.stdout.readline)
        pool, ours = Pool(), engine(Ref("mover", 2), {TARGET.id: Peer(TARGET, *json.loads(line))}, HERE)
        await ours.start()
        ours.register_local_memory(pool.view, name="pool", fd=pool.fd)
        try:
            yield ours
        finally:
            await ours.close()
            child.stdin.close()


class Posted:
    """Counts the work requests that this process posts."""

    def __init__(self) -> None:
        self.count, plain = 0, QueuePair.post

        def post(pair: QueuePair, works: Sequence[Work]) -> None:
            self.count += len(works)
            plain(pair, works)

        QueuePair.post = post  # type: ignore[method-assign]  # the benchmark's own process


async def moved(ours: Engine, size: int, count: int, posted: Posted) -> dict[str, float]:
    places = [n * APART * size for n in range(count)]
    requests = [Request(Op.WRITE, "pool", at, TARGET, "pool", at, size) for at in places]
    before, user, begin = posted.count, os.times().user, time.perf_counter()
    results = await ours.transfer(requests, TIMEOUT)
    seconds, used = time.perf_counter() - begin, os.times().user - user
    if any(r.status is not Status.COMPLETED or r.transport != "rdma" for r in results):
        raise RuntimeError(str(next((r.error for r in results if r.error), "not carried by rdma")))
    return {"speed": size * count / MIB / seconds, "user": used, "works": posted.count - before}


def perftest(program: str, size: int) -> float:
    """MiB/s of ``ib_write_bw``, from device to device as ours. Raises RuntimeError."""
    flags = [program, "-s", str(size), "-D", str(DURATION), "-f", str(MARGIN), "-F"]
    with subprocess.Popen([*flags, "-d", THERE], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            said = ""
            for _ in range(20):  # until it listens
                time.sleep(0.3)
                done = subprocess.run([*flags, "-d", HERE, THERE_ADDRESS], capture_output=True, text=True, timeout=60)
                if found := ITERATIONS.search(done.stdout):
                    return int(found[2]) * size / MIB / (DURATION - 2 * MARGIN)
                said = (done.stdout + done.stderr).strip()[-200:]
                if server.poll() is not None:
                    break
            raise RuntimeError(f"ib_write_bw: {said}")
        finally:
            server.terminate()


async def measure(program: str, rounds: int) -> list[dict[str, Any]]:
    posted, out = Posted(), []
    async with mover() as ours:
        for size, count in CASES:
            await moved(ours, size, count, posted)  # registers, connects
            case: dict[str, Any] = {"size": size, "count": count, "ours": [], "perftest": []}
            for _ in range(rounds):
                case["ours"].append(await moved(ours, size, count, posted))
                case["perftest"].append(await asyncio.to_thread(perftest, program, size))
            out.append(case)
    return out


def main() -> None:
    if "--serve" in sys.argv:
        asyncio.run(serve())
    else:
        print(json.dumps(asyncio.run(measure(sys.argv[1], int(sys.argv[2])))), flush=True)


if __name__ == "__main__":
    main()
