"""An open loop: every request is sent when it is due, whatever became of those before."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Sequence

from cli.load.outcome import Outcome
from shared.workload.trace import TraceRequest

Ask = Callable[[bytes, Outcome], Awaitable[None]]
Body = Callable[[TraceRequest], bytes]


class Load:
    """Sends requests, and has their outcomes, in the order of arrival; ``ended`` are those that are final, in the order
    of their ends. ``clock`` begins at 0 with :meth:`run`; ``seconds`` is what that took in the end."""

    def __init__(self, requests: Sequence[TraceRequest], body: Body) -> None:
        self._requests, self._body = requests, body
        self.outcomes: list[Outcome] = []
        self.ended: list[Outcome] = []
        self.running: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._began = time.perf_counter()
        self.seconds = 0.0

    def clock(self) -> float:
        return time.perf_counter() - self._began

    @property
    def total(self) -> int:
        """Requests that will have been sent in the end."""
        return len(self._requests)

    @property
    def interrupted(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Send no more, and leave what is under way."""
        self._stopped.set()

    async def run(self, ask: Ask) -> None:
        """Until all have ended, or somebody stops it; what is under way then is given up."""
        _more_files()
        self._began = time.perf_counter()
        sending = asyncio.create_task(self._send(ask))
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
            answered = asyncio.create_task(self._answered())
            await asyncio.wait([answered, stopped], return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
        finally:
            self.seconds = self.clock()
            ended = [sending, stopped, *self.running]
            for task in ended:
                task.cancel()
            results = await asyncio.gather(*ended, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _answered(self) -> None:
        """One registration with each that runs, not one for every answer: that would disturb what is measured."""
        while self.running:
            await asyncio.wait(tuple(self.running))

    async def _send(self, ask: Ask) -> None:
        """What can be made beforehand is made before a request is due."""
        first = self._requests[0].arrival if self._requests else 0.0
        for number, request in enumerate(self._requests):
            body, due = self._body(request), request.arrival - first
            await self._until(due)
            outcome = Outcome(number, due, request.input_tokens, request.output_tokens)
            outcome.late = self.clock() - due
            self.outcomes.append(outcome)
            task = asyncio.create_task(self._ask(ask, body, outcome))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
            if self.clock() > due + 0.01:
                await asyncio.sleep(0)  # late already: those before must get to send, too

    async def _until(self, due: float) -> None:
        """The loop may wake a little too early, by the resolution of its clock."""
        if (left := due - self.clock()) > 0:
            await asyncio.sleep(left)

    async def _ask(self, ask: Ask, body: bytes, outcome: Outcome) -> None:
        outcome.late = self.clock() - outcome.due
        await ask(body, outcome)
        self.ended.append(outcome)


def _more_files() -> None:
    """As many connections as the system allows: an open loop cannot wait for one to become free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
