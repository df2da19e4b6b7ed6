"""Many streams from one process, read as cheaply as can be. Run as a child, with a job as JSON on its stdin."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

from benchmarks.processes import in_module

OVERLAP = 8  # bytes of the data before that an event's head may have begun in
TAIL = 1024
EVENT, DONE = b"data: {", b"data: [DONE]"
COMPLETION = re.compile(rb'"completion_tokens":(\d+)')


@dataclass
class Job:
    """``streams`` completions of ``max_tokens`` tokens, begun over ``ramp`` seconds, and ``slow`` more that read
    ``slow_rate`` bytes a second (0: nothing at all) for ``slow_seconds``."""

    host: str
    port: int
    model: str
    streams: int
    max_tokens: int
    ramp: float = 0.0
    path: str = "/v1/completions"
    slow: int = 0
    slow_rate: int = 10
    slow_seconds: float = 0.0
    slow_tokens: int = 4096
    timeout: float = 600.0


@dataclass
class Result:
    """``done``: streams that ended well; ``errors``: the others, by reason. ``gaps``: for each stream the longest time
    between two pieces, in seconds. ``slow_bytes``: what each slow reader got; ``slow_cut``: how many were cut off."""

    done: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    events: int = 0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    slow_bytes: list[int] = field(default_factory=list)
    slow_cut: int = 0

    def fail(self, why: str) -> None:
        self.errors[why] = self.errors.get(why, 0) + 1


class Stream(asyncio.Protocol):
    """One connection, one answer."""

    def __init__(self, request: bytes, result: Result, over: asyncio.Future[None]) -> None:
        self._request, self._result, self._over = request, result, over
        self._tail = b""
        self._begun = self._last = 0.0
        self._gap = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._begun = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._last:
            self._gap = max(self._gap, now - self._last)
        else:
            self._result.ttft.append(now - self._begun)
            if not data.startswith(b"HTTP/1.1 200"):
                return self._end(data[9:12].decode(errors="replace"))
        self._last = now
        edge = self._tail[-OVERLAP:]
        self._result.events += (edge + data).count(EVENT) - edge.count(EVENT)
        self._tail = (self._tail + data)[-TAIL:]
        if DONE in self._tail:
            self._end("")
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("connection lost")

    def _end(self, why: str) -> None:
        if self._over.done():
            return
        if why:
            self._result.fail(why)
        else:
            found = COMPLETION.search(self._tail)
            self._result.tokens += int(found[1]) if found else 0
            self._result.gaps.append(self._gap)
            self._result.done += 1
        self._over.set_result(None)
        self._transport.close()


def request(job: Job, max_tokens: int, number: int) -> bytes:
    """The bytes of one POST; every prompt is another one."""
    body = {"model": job.model, "prompt": f"Stream number {number} goes on.", "max_tokens": max_tokens}
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    head = f"POST {job.path} HTTP/1.1\r\nHost: {job.host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def one(job: Job, number: int, result: Result) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(job.ramp * number / job.streams)
    over: asyncio.Future[None] = loop.create_future()
    content = request(job, job.max_tokens, number)
    try:
        async with asyncio.timeout(job.timeout):
            await loop.create_connection(lambda: Stream(content, result, over), job.host, job.port)
            await over
    except OSError as e:
        result.fail(type(e).__name__)


async def slow(job: Job, number: int, result: Result) -> None:
    """Reads ``slow_rate`` bytes each second from a socket with little room; counts what it got, and whether it was cut
    off."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (job.host, job.port))
        await loop.sock_sendall(sock, request(job, job.slow_tokens, 1_000_000 + number))
        got, until = 0, loop.time() + job.slow_seconds
        while loop.time() < until:
            await asyncio.sleep(1.0)
            if job.slow_rate == 0:
                continue
            try:
                async with asyncio.timeout(1.0):
                    piece = await loop.sock_recv(sock, job.slow_rate)
            except TimeoutError:
                continue
            except OSError:
                piece = b""
            if not piece:
                result.slow_cut += 1
                break
            got += len(piece)
        result.slow_bytes.append(got)


async def run(job: Job) -> Result:
    result, began = Result(), time.perf_counter()
    slows = [asyncio.create_task(slow(job, i, result)) for i in range(job.slow)]
    await asyncio.gather(*(one(job, i, result) for i in range(job.streams)))
    result.seconds = time.perf_counter() - began
    await asyncio.gather(*slows)
    return result


async def in_child(job: Job) -> Result:
    """Run the job in a process of its own."""
    return Result(**await in_module("benchmarks.stream_client", asdict(job)))


if __name__ == "__main__":
    json.dump(asdict(asyncio.run(run(Job(**json.load(sys.stdin))))), sys.stdout)
