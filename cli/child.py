"""One supervised child process: in a session of its own, its output read line by line, stopped with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.embedded import die_with_parent

KEPT_LINES = 30
LONGEST_LINE = 64 * 1024


@dataclass(frozen=True)
class Spec:
    """What to run. ``stage`` orders: started from low to high, stopped from high to low. ``grace``: seconds between
    SIGTERM and SIGKILL. ``env`` is added to the supervisor's own environment; secrets go there, never into ``argv``."""

    name: str
    argv: Sequence[str]
    stage: int
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 3.0


class Child:
    """A process, or the place of one that died and will be started again."""

    def __init__(self, spec: Spec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.starts = 0
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._on_line = on_line
        self.group = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
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
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            env={**os.environ, **self.spec.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LONGEST_LINE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self._reader = asyncio.create_task(self._read(self._process), name=f"log {self.spec.name}")
        self.group = self._process.pid
        return self.group

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                raw = await process.stdout.readuntil(b"\n")
            except asyncio.IncompleteReadError as error:
                raw = error.partial
            except asyncio.LimitOverrunError as error:
                raw = await process.stdout.read(error.consumed)
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            self.tail.append(line)
            self._on_line(self.spec.name, line)

    async def wait(self) -> int:
        """The exit code, once it has ended and its last lines were read."""
        if self._process is None:
            return 0
        code = await self._process.wait()
        if self._reader is not None:  # a grandchild may keep the pipe open: do not wait for it
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reader), 0.5)
        return code

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group for SIGKILL, else to the process, which looks after its own children."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            elif self._process.returncode is None:
                self._process.send_signal(number)

    async def stop(self) -> bool:
        """SIGTERM, after the grace SIGKILL, then SIGKILL for what is left of its group. False: it had to be killed."""
        in_time = True
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), self.spec.grace)
        except TimeoutError:
            in_time = False
        self.signal(signal.SIGKILL)
        await self.wait()
        if self._reader is not None:
            self._reader.cancel()
        return in_time


def exit_words(code: int) -> str:
    """``exited with code 1`` or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
