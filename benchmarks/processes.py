"""The contenders' processes: a mesh of its own per benchmark, and CPU seconds of a whole process tree."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MOONCAKE = Path(sys.executable).parent / "mooncake"


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process and all its living descendants."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


@dataclass(frozen=True)
class Mesh:
    """A running ``mooncake up``."""

    url: str
    pid: int

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def mesh(*args: str, timeout: float = 180.0, log: Path | None = None) -> Iterator[Mesh]:
    """Start ``mooncake up`` with these flags, wait until it is ready, stop it at the end.

    Raises RuntimeError with the end of its log when it exits, or is not ready within ``timeout`` seconds.
    """
    port = free_port()
    path = log or Path(os.environ.get("TMPDIR", "/tmp")) / f"mooncake-bench-{port}.log"
    with path.open("wb") as out:
        child = subprocess.Popen(
            [str(MOONCAKE), "up", "--port", str(port), *args],
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    running = Mesh(f"http://127.0.0.1:{port}", child.pid)
    try:
        _wait_ready(running, child, time.monotonic() + timeout, path)
        yield running
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if log is None:
            path.unlink(missing_ok=True)


def _wait_ready(running: Mesh, child: subprocess.Popen[bytes], deadline: float, log: Path) -> None:
    while True:
        if (
            b"Ready after" in log.read_bytes()
        ):  # every instance has joined: /ready is true from the first of each role on
            return
        if child.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace").splitlines()[-20:]
            raise RuntimeError("mooncake up is not ready:\n" + "\n".join(tail))
        time.sleep(0.2)


async def in_module(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """What the program ``name`` prints, as JSON, of the job that it reads: a client is a process of its own."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", name, stdin=pipe, stdout=pipe)
    out, _ = await child.communicate(json.dumps(job).encode())
    found: dict[str, Any] = json.loads(out)
    return found
