"""The generations of one request, side by side: one queue of tokens, one owner that ends them all."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from services.conductor.gateway.choices import leader, related
from services.conductor.generation import Dispatcher, Generation, Token
from shared.errors import AttemptFailed, Contended, Unavailable
from shared.inbox import Inbox
from shared.telemetry import held_gauge

QUEUED = 64  # tokens that wait here for a slow reader; more wait in the dispatcher
PATIENCE = 60.0  # seconds without any token of the request after which a choice that was refused gives up
SHORTEST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds until such a choice asks again


class Step(NamedTuple):
    choice: int
    token: Token


class Generations:
    """Async context manager; leaving it closes what still runs and waits until it is closed.

    ``n`` of them in a row answer the same prompt. The first starts at once; the others when it has its first token,
    so that they find the prompt's blocks in the cache (a prompt without a full block has none to wait for). Whether
    the request is refused, the very first decides for all.
    """

    def __init__(self, dispatcher: Dispatcher, generations: Sequence[Generation], n: int = 1) -> None:
        self._dispatcher = dispatcher
        self._generations = related(generations, n)
        self._n = n
        self._begun = [asyncio.Event() for _ in generations]
        self._steps = Inbox[Step | Exception]()
        self._room = asyncio.Event()
        self._moved = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._gauge = held_gauge("gateway_generations")

    async def __aenter__(self) -> Generations:
        self._tasks = [
            asyncio.create_task(self._run(choice, generation), name=f"generation {generation.id}")
            for choice, generation in enumerate(self._generations)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)  # cancelled here, the tasks still run until their iterators are closed

    async def batch(self) -> list[Step]:
        """All tokens that are there; waits for the first. Raises what a generation raised, after its tokens."""
        await self._steps.wait()
        self._room.set()
        steps: list[Step] = []
        while self._steps:
            step = self._steps.take()
            if isinstance(step, Step):
                steps.append(step)
            elif steps:
                self._steps.put(step)
                break
            else:
                raise step
        return steps

    def fail(self, error: Exception) -> None:
        """Have ``batch`` raise it, behind the tokens that are there."""
        self._steps.put(error)

    def end(self, choice: int) -> None:
        """Cancel one of them; its tokens that are queued still come."""
        self._tasks[choice].cancel()

    async def _put(self, step: Step | Exception) -> None:
        while len(self._steps) >= QUEUED:
            self._room.clear()
            await self._room.wait()
        self._steps.put(step)

    async def _run(self, choice: int, generation: Generation) -> None:
        first = leader(choice, self._n)
        try:
            if choice == 0:
                await self._pump(choice, generation)
            else:
                if choice != first and generation.keys:
                    await self._begun[first].wait()
                await self._pump_patiently(choice, generation)
        except Exception as error:
            await self._put(error)

    async def _pump_patiently(self, choice: int, generation: Generation) -> None:
        """The request was accepted as a whole: a choice that is refused asks again as long as others go on.

        Each time as a request that has just come: the objective is not for the time it waited, and the instances that
        gave up the last one know its id as cancelled.
        """
        while True:
            now = time.monotonic()
            try:
                return await self._pump(choice, replace(generation, id=uuid.uuid4().hex, arrived=now))
            except (Contended, Unavailable) as error:
                if self._begun[choice].is_set() or time.monotonic() > self._moved + PATIENCE:
                    raise
                await asyncio.sleep(min(max(error.retry_after_ms / 1000, SHORTEST_WAIT), LONGEST_WAIT))

    async def _pump(self, choice: int, generation: Generation) -> None:
        """To the iterator's own end: one that is closed behind its last token would count as cancelled."""
        self._gauge.inc()
        stream, finish = self._dispatcher.generate(generation), ""
        try:
            async for token in stream:
                finish, self._moved = token.output.finish, time.monotonic()
                await self._put(Step(choice, token))
                if token.output.index == 0:
                    self._begun[choice].set()
            if not finish:
                raise AttemptFailed("the generation ended without a finish reason")
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
            self._gauge.dec()
