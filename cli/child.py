"""One supervised child process: in a session of its own, its output read line by line, stopped with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shared.embedded import die_with_parent

KEPT_LINES = 30
LONGEST_LINE = 64 * 1024
LAST_LINES = 0.5
"""Seconds to wait for the end of a dead process's output."""


@dataclass(frozen=True)
class Spec:
    """What to run. ``stage`` orders: started from low to high, stopped from high to low. ``grace``: seconds between
    SIGTERM and SIGKILL. ``env`` is its whole environment; secrets go there, never into ``argv``."""

    name: str
    argv: Sequence[str]
    stage: int
    env: Mapping[str, str]
    grace: float = 3.0


class Child:
    """A process, or the place of one that died and will be started again.

    Its end is seen through a pidfd, not through the end of its output: a grandchild may hold that open.
    """

    def __init__(self, spec: Spec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.starts = 0
        self.group = 0
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._output: asyncio.ReadTransport | None = None
        self._since = 0.0

    @property
    def lived(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._since

    async def start(self) -> int:
        """Start it; the kernel kills it when this thread ends. Returns its process id, which is also its group."""
        self.tail.clear()
        self.starts += 1
        self._since = time.monotonic()
        self._process = self._spawn()
        self.group = self._process.pid
        stream = asyncio.StreamReader(LONGEST_LINE)
        self._output, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._process.stdout
        )
        self._reader = asyncio.create_task(self._read(stream), name=f"log {self.spec.name}")
        return self.group

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.spec.argv,
            env=self.spec.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                raw = error.partial
            except asyncio.LimitOverrunError as error:
                raw = await stream.read(error.consumed)
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            self._on_line(self.spec.name, line)

    async def wait(self) -> int:
        """The exit code, once it has ended, what is left of its group was killed, and its last lines were read."""
        if self._process is None:
            return 0
        if self._process.returncode is None:
            await _ended(self._process.pid)
            self.kill()  # while it is not reaped, its number cannot be anybody else's
            self._process.wait()
        if self._reader is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reader), LAST_LINES)
        return self._process.returncode

    def terminate(self) -> None:
        """SIGTERM to the process, which looks after its own children."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to its whole group, if it has not been reaped."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)

    async def stop(self) -> bool:
        """SIGTERM, and SIGKILL after the grace. False: it had to be killed."""
        in_time = True
        self.terminate()
        try:
            await asyncio.wait_for(self.wait(), self.spec.grace)
        except TimeoutError:
            in_time = False
            self.kill()
            await self.wait()
        self.forget()
        return in_time

    def forget(self) -> None:
        """Let go of its output."""
        if self._reader is not None:
            self._reader.cancel()
        if self._output is not None:
            self._output.close()


async def _ended(pid: int) -> None:
    """Waits until the process is over; it is left to be reaped."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    fd = os.pidfd_open(pid)
    loop.add_reader(fd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def exit_words(code: int) -> str:
    """``exited with code 1`` or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
