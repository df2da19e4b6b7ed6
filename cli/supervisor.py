"""Starts the processes of a mesh, starts them again when they die, stops them in order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from cli.backoff import Backoff
from cli.child import Child, Spec, exit_words
from cli.leftovers import MARK
from shared.errors import ConfigError, MooncakeError

WRONG_SETTING = 2
"""Exit code of a service whose settings are refused: starting it again cannot help."""


class CrashLoop(MooncakeError):
    """A process cannot be kept alive; the message carries its last lines."""

    code = "crash_loop"


class Report(Protocol):
    """Where the supervisor says what it sees."""

    def line(self, name: str, text: str) -> None:
        """A line that child ``name`` wrote."""

    def event(self, name: str, text: str, bad: bool = False) -> None:
        """Something that happened to child ``name``."""


class Warden:
    """Our end of the pipe to :mod:`cli.warden`, the process that outlives a ``kill -9`` of ours. ``name``: the variable
    that carries the mark."""

    def __init__(self, mark: str, name: str = MARK) -> None:
        read, self._pipe = os.pipe()
        script = Path(__file__).with_name("warden.py")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(read), mark, name],
            pass_fds=[read],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={},  # without the mark: it must not find itself
        )
        os.close(read)

    def tell(self, word: str) -> None:
        with contextlib.suppress(OSError):  # it died; the parent-death signal still stands
            os.write(self._pipe, word.encode() + b"\n")

    def close(self) -> None:
        """Everything was stopped: it looks once more for what got away, and ends."""
        os.close(self._pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


class Supervisor:
    """Owner of all processes of one mesh. ``mark`` is in the environment of each of them, and of their children."""

    def __init__(self, mark: str, report: Report) -> None:
        self.children: dict[str, Child] = {}
        self._mark = mark
        self._report = report
        self._warden: Warden | None = None
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._settled = False
        self._broken: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        self._broken = asyncio.get_running_loop().create_future()
        self._warden = Warden(self._mark)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()
        if self._warden is not None:
            self._warden.close()

    def settled(self) -> None:
        """The mesh was ready once: from now on a crash loop is reported and retried, not fatal."""
        self._settled = True

    async def start(self, spec: Spec) -> None:
        """Start a child and keep it alive."""
        child = Child(spec, self._report.line)
        self.children[spec.name] = child
        await self._launch(child)
        self._watchers[spec.name] = asyncio.create_task(self._watch(child), name=f"watch {spec.name}")

    async def broken(self) -> None:
        """Waits for the day when the mesh cannot be kept up. Raises CrashLoop."""
        assert self._broken is not None
        await asyncio.shield(self._broken)

    async def _launch(self, child: Child) -> None:
        try:
            group = await child.start()
        except OSError as error:
            raise ConfigError(f"cannot start {child.spec.name} ({child.spec.argv[0]}): {error.strerror}") from None
        self._tell(f"+{group}")

    def _tell(self, word: str) -> None:
        if self._warden is not None:
            self._warden.tell(word)

    async def _watch(self, child: Child) -> None:
        backoff = Backoff()
        while True:
            code = await child.wait()
            self._tell(f"-{child.group}")
            delay = backoff.died(child.lived)
            if not self._settled and (backoff.looping or code == WRONG_SETTING):
                self._give_up(child, code)
                return
            self._say_died(child, code, delay, backoff)
            child.forget()
            await asyncio.sleep(delay)
            try:
                await self._launch(child)
            except ConfigError as error:  # no memory or no process number left: perhaps there will be
                self._report.event(child.spec.name, error.message, bad=True)

    def _say_died(self, child: Child, code: int, delay: float, backoff: Backoff) -> None:
        words = f"{exit_words(code)}; starting it again in {delay:.1f} s"
        if backoff.looping:
            words += f" (died {backoff.failures} times in a row). Its last words:\n{last_words(child)}"
        self._report.event(child.spec.name, words, bad=True)

    def _give_up(self, child: Child, code: int) -> None:
        assert self._broken is not None
        if not self._broken.done():
            again = f" at start {child.starts}" if child.starts > 1 else ""
            message = f"{child.spec.name} {exit_words(code)}{again}. Its last words:\n{last_words(child)}"
            self._broken.set_exception(CrashLoop(message))

    async def stop(self) -> None:
        """Stop every child, stage after stage, the last started first. Idempotent."""
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        for stage in sorted({child.spec.stage for child in self.children.values()}, reverse=True):
            await asyncio.gather(*(self._stop(c) for c in self.children.values() if c.spec.stage == stage))
        self.children.clear()
        self._watchers.clear()
        if self._broken is not None:
            self._broken.cancel()

    async def _stop(self, child: Child) -> None:
        if not await child.stop():
            words = f"did not stop within {child.spec.grace:g} s and was killed"
            self._report.event(
                child.spec.name, words, bad=self._settled
            )  # one that still loads its model hears nothing

    def kill(self) -> None:
        """At once, no questions asked: the second Ctrl-C."""
        for child in self.children.values():
            child.kill()


def last_words(child: Child, count: int = 15) -> str:
    lines: Sequence[str] = list(child.tail)[-count:]
    return "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
