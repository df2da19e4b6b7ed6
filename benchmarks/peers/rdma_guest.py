"""In the RDMA guest: WRITEs of this project's engine beside ``ib_write_bw``, round by round, over the same two devices.

Prints one JSON line: for each case the MiB/s of both in each round, and CPU seconds and work requests of ours. The
guest counts no time as user's, so CPU seconds are of user and system, and system calls are dear there.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from benchmarks.transfer import SECRET, TARGET, Pool, nobody
from services.store.transfer.base import Op, Peer, Request, Status
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
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

    options: dict[str, Any] = {"rdma_devices": (device,), "connect_timeout": 20.0}
    return Engine(ref, secret=SECRET, resolve=resolve, policy=TransportPolicy.parse("require:rdma"), **options)


async def serve() -> None:
    pool, target = Pool(), engine(TARGET, {}, THERE)
    target.register_local_memory(pool.view, name="pool", fd=pool.fd)
    await target.start()
    peer = target.peer()
    print(json.dumps([peer.host, peer.port, peer.host_id, peer.shm]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await target.close()


@contextlib.contextmanager
def target() -> Iterator[Peer]:
    """A process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.rdma_guest", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        yield Peer(TARGET, *json.loads(child.stdout.readline()))
        child.stdin.close()


@contextlib.asynccontextmanager
async def mover(peer: Peer) -> AsyncIterator[Engine]:
    """Our end, its pool registered."""
    pool, ours = Pool(), engine(Ref("mover", 2), {TARGET.id: peer}, HERE)
    await ours.start()
    ours.register_local_memory(pool.view, name="pool", fd=pool.fd)
    try:
        yield ours
    finally:
        await ours.close()


class Posted:
    """Counts the work requests that this process posts."""

    def __init__(self) -> None:
        self.count = 0
        pairs: Any = importlib.import_module("services.store.transfer.rdma.queue_pair").QueuePair
        plain = pairs.post

        def post(pair: object, works: Sequence[object]) -> None:
            self.count += len(works)
            plain(pair, works)

        pairs.post = post


async def moved(ours: Engine, size: int, count: int, posted: Posted) -> dict[str, float]:
    places = [n * APART * size for n in range(count)]
    requests = [Request(Op.WRITE, "pool", at, TARGET, "pool", at, size) for at in places]
    before, cpu, begin = posted.count, time.process_time(), time.perf_counter()
    results = await ours.transfer(requests, TIMEOUT)
    seconds, used = time.perf_counter() - begin, time.process_time() - cpu
    if any(r.status is not Status.COMPLETED or r.transport != "rdma" for r in results):
        raise RuntimeError(str(next((r.error for r in results if r.error), "not carried by rdma")))
    return {"speed": size * count / MIB / seconds, "cpu": used, "works": posted.count - before}


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


async def measure(peer: Peer, program: str, rounds: int) -> list[dict[str, Any]]:
    posted, out = Posted(), []
    async with mover(peer) as ours:
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
        with target() as peer:
            found = asyncio.run(measure(peer, sys.argv[1], int(sys.argv[2])))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
