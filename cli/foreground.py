"""A command that runs children until somebody wants it to stop: the first Ctrl-C asks, the second does not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine

from cli.console import err
from cli.supervisor import Supervisor

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Foreground:
    """Around a supervisor that has been entered, on the running loop of the main thread."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._stop = asyncio.Event()

    async def run(self, work: Coroutine[None, None, None]) -> None:
        """Runs ``work`` until it ends or somebody wants to stop. Raises CrashLoop when a process cannot be kept alive.
        The children are the supervisor's to stop."""
        self._on_signals()
        await self._while_wanted(work)
        err.print("stopping (Ctrl-C again: at once)", style="bold")

    def _on_signals(self) -> None:
        for number in STOPPING:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._supervisor.kill()
        self._stop.set()

    async def _while_wanted(self, work: Coroutine[None, None, None]) -> None:
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._supervisor.broken())]
        tasks.append(asyncio.create_task(self._wanted()))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()

    async def _wanted(self) -> None:
        await self._stop.wait()
