"""In the RDMA guest: WRITEs of this engine beside ``ib_write_bw``, and transfers in which a cable is pulled.

Both movers use the same two devices, round by round; cables are pulled from two devices at each end. Prints one JSON
line: for each case the MiB/s of both in each round, and CPU seconds; seconds of a work request; for each operation the
seconds of each round without and with a cable pulled. The guest counts no time as user's, so what we do for a work
request is timed where it is done (:class:`Posting`), and CPU seconds are of user and system, software NIC included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from benchmarks.peers.cables import carry
from benchmarks.peers.rdma_posting import Posting
from benchmarks.transfer import SECRET, TARGET, Pool, nobody
from services.store.transfer.base import Op, Peer, Request, Status
from services.store.transfer.engine import Engine
from services.store.transfer.policy import TransportPolicy
from shared.messages import Ref

HERE, THERE, THERE_ADDRESS = "rxe0", "rxe1", "10.77.0.2"
BOTH_HERE, BOTH_THERE = "rxe0,rxe2", "rxe1,rxe3"
PULLED = 2
"""The cable of ``rxe2``, ours."""
KIB, MIB = 1 << 10, 1 << 20
CASES = ((16 * KIB, 512), (64 * KIB, 512), (MIB, 48), (4 * MIB, 16))
"""(bytes of a request, how many in a batch)."""
APART = 2
"""Requests lie so many times their size apart, so that none is carried together with the next."""
TIMEOUT = 120.0
DURATION, MARGIN = 4, 1
POSTED = 20
"""Rounds in which the time of a work request is taken."""
LONG = 64 * MIB
"""Of a transfer in which a cable is pulled, after PART of it, in requests of 1 MiB."""
PART = 16 * MIB
ITERATIONS = re.compile(r"^\s*(\d+)\s+(\d+)\s+[\d.]+\s+[\d.]+\s", re.MULTILINE)
"""Of perftest's table: bytes, iterations. Its own speed is wrong where /proc/cpuinfo tells no clock rate, as here."""


def engine(ref: Ref, peers: dict[str, Peer], devices: str) -> Engine:
    async def resolve(id: str) -> Peer:
        return peers[id] if id in peers else await nobody(id)

    options: dict[str, Any] = {"rdma_devices": devices.split(","), "connect_timeout": 20.0}
    return Engine(ref, secret=SECRET, resolve=resolve, policy=TransportPolicy.parse("require:rdma"), **options)


async def serve(devices: str) -> None:
    pool, target = Pool(), engine(TARGET, {}, devices)
    target.register_local_memory(pool.view, name="pool", fd=pool.fd)
    await target.start()
    peer = target.peer()
    print(json.dumps([peer.host, peer.port, peer.host_id, peer.shm]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await target.close()


@contextlib.contextmanager
def target(devices: str) -> Iterator[Peer]:
    """A process of its own."""
    command = [sys.executable, "-m", "benchmarks.peers.rdma_guest", "--serve", devices]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        yield Peer(TARGET, *json.loads(child.stdout.readline()))
        child.stdin.close()


@contextlib.asynccontextmanager
async def mover(peer: Peer, devices: str) -> AsyncIterator[Engine]:
    """Our end, its pool registered."""
    pool, ours = Pool(), engine(Ref("mover", 2), {TARGET.id: peer}, devices)
    await ours.start()
    ours.register_local_memory(pool.view, name="pool", fd=pool.fd)
    try:
        yield ours
    finally:
        await ours.close()


async def carried(ours: Engine, requests: Sequence[Request]) -> float:
    """Seconds. Raises RuntimeError."""
    begin = time.perf_counter()
    results = await ours.transfer(requests, TIMEOUT)
    seconds = time.perf_counter() - begin
    if any(r.status is not Status.COMPLETED or r.transport != "rdma" for r in results):
        raise RuntimeError(str(next((r.error for r in results if r.error), "not carried by rdma")))
    return seconds


def apart(size: int, count: int) -> list[Request]:
    places = [n * APART * size for n in range(count)]
    return [Request(Op.WRITE, "pool", at, TARGET, "pool", at, size) for at in places]


async def moved(ours: Engine, size: int, count: int) -> dict[str, float]:
    cpu = time.process_time()
    seconds = await carried(ours, apart(size, count))
    return {"speed": size * count / MIB / seconds, "cpu": time.process_time() - cpu}


async def posted(ours: Engine, rounds: int) -> list[float]:
    """Seconds of a work request in each round: what we do for it, without the NIC."""
    each = []
    with Posting() as posting:
        for _ in range(1 + rounds):
            count, seconds = posting.count, posting.seconds
            await carried(ours, apart(16 * KIB, 64))
            each.append((posting.seconds - seconds) / (posting.count - count))
    return each[1:]


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


async def measure(peer: Peer, program: str, rounds: int) -> tuple[list[dict[str, Any]], list[float]]:
    """Of each case, and seconds of a work request."""
    out = []
    async with mover(peer, HERE) as ours:
        for size, count in CASES:
            await moved(ours, size, count)  # registers, connects
            case: dict[str, Any] = {"size": size, "count": count, "ours": [], "perftest": []}
            for _ in range(rounds):
                case["ours"].append(await moved(ours, size, count))
                case["perftest"].append(await asyncio.to_thread(perftest, program, size))
            out.append(case)
        return out, await posted(ours, POSTED)


# -- a cable pulled in the middle ------------------------------------------------------------------------------


async def measure_pulled(peer: Peer, rounds: int) -> list[dict[str, Any]]:
    out = []
    async with mover(peer, BOTH_HERE) as ours:
        for op in (Op.READ, Op.WRITE):
            requests = [Request(op, "pool", at, TARGET, "pool", at, MIB) for at in range(0, LONG, MIB)]
            case: dict[str, Any] = {"op": op.value, "size": LONG, "plain": [], "pulled": []}
            await carried(ours, requests)
            for _ in range(rounds):
                case["plain"].append(await carried(ours, requests))
                case["pulled"].append(await pulled(ours, requests))
            out.append(case)
    return out


async def pulled(ours: Engine, requests: Sequence[Request]) -> float:
    """Seconds with a cable pulled after a part; it is plugged again, and both NICs are at work, when this returns."""
    before = sum(through(ours))
    running = asyncio.create_task(carried(ours, requests))
    while sum(through(ours)) - before < PART:  # noqa: ASYNC110  (nothing tells when)
        await asyncio.sleep(0.005)
    carry(f"port{PULLED}", False)
    seconds = await running
    carry(f"port{PULLED}", True)
    begun, used = time.monotonic(), through(ours)
    while not all(now > then for now, then in zip(through(ours), used, strict=True)):
        if time.monotonic() - begun > TIMEOUT:
            raise RuntimeError("a NIC whose cable is plugged again is not used")
        await carried(ours, requests[:8])
        await asyncio.sleep(0.1)
    return seconds


def through(ours: Engine) -> list[int]:
    """Bytes that each NIC has moved."""
    return [nic.read + nic.written for nic in ours.nics()]


def main() -> None:
    if "--serve" in sys.argv:
        return asyncio.run(serve(sys.argv[-1]))
    program, rounds, pulls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    cases, work, cables = list[dict[str, Any]](), list[float](), list[dict[str, Any]]()
    if rounds:
        with target(THERE) as peer:
            cases, work = asyncio.run(measure(peer, program, rounds))
    if pulls:
        with target(BOTH_THERE) as peer:
            cables = asyncio.run(measure_pulled(peer, pulls))
    print(json.dumps({"cases": cases, "work": work, "cables": cables}), flush=True)


if __name__ == "__main__":
    main()
