"""What the driver and a contender say to each other: a JSON line each way. Standard library only, for peers."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0
"""Seconds until a contender that does not answer counts as hung."""

Answer = dict[str, Any]
Handler = Callable[[Answer], Awaitable[Answer]]
Call = Callable[[], Awaitable[None]]


# -- the contender's side ----------------------------------------------------------------------------------------


def own_stdout() -> IO[str]:
    """The real standard output, for lines alone: what libraries print goes to the log from now on."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lines


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends, stopped or not."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


async def answer(handle: Handler, lines: IO[str], ready: Answer) -> None:
    """Say ``ready``, then answer each line of standard input. What ``handle`` raises is that row's error alone."""
    lines.write(json.dumps(ready) + "\n")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            said = await handle(json.loads(line))
        except Exception as e:
            said = {"error": f"{type(e).__name__}: {e}"}
        lines.write(json.dumps(said) + "\n")


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time of all living threads of these processes."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except OSError:
                pass  # the thread has ended meanwhile
    return total / 1e9


async def series(call: Call, seconds: float, pids: Sequence[int], least: int = 2, most: int = 100_000) -> Answer:
    """Call again and again for about ``seconds``: the median and 99th percentile of a call in seconds, how many there
    were, and CPU seconds a call of all processes ``pids``."""
    clock, times = time.perf_counter, list[float]()
    cpu, end = cpu_seconds(pids), clock() + seconds
    while len(times) < most and (len(times) < least or clock() < end):
        begin = clock()
        await call()
        times.append(clock() - begin)
    used = cpu_seconds(pids) - cpu
    times.sort()
    late = times[min(len(times) - 1, int(0.99 * len(times)))]
    return {"seconds": statistics.median(times), "p99": late, "calls": len(times), "cpu": used / len(times)}


# -- the driver's side -------------------------------------------------------------------------------------------


class Failed(Exception):
    """A contender did not start, did not answer in time, or has ended; the message is for people."""


class Child:
    """A process that answers lines. ``log`` gets what it prints besides. Close it: it ends when its input does."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], log: Path) -> None:
        """Waits until it is ready. Raises Failed."""
        self._log = log
        self._heard = b""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path} | env,
            )
        try:
            self.ready = self._read()
        except Failed:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **request: Any) -> Answer:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as e:
            raise Failed(self._end()) from e
        return self._read()

    def _read(self) -> Answer:
        assert self._process.stdout is not None
        pipe, end = self._process.stdout.fileno(), time.monotonic() + PATIENCE
        while b"\n" not in self._heard:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                self._process.kill()
                raise Failed(f"no answer within {PATIENCE:g} s")
            more = os.read(pipe, 1 << 16)
            if not more:
                raise Failed(self._end())
            self._heard += more
        line, self._heard = self._heard.split(b"\n", 1)
        answer: Answer = json.loads(line)
        return answer

    def _end(self) -> str:
        try:
            code: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        said = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with {code}: {said[-1] if said else 'it said nothing'}"

    def close(self) -> None:
        """Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:
                pass
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
