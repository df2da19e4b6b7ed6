"""The generations of one request, side by side: one queue of tokens, one owner that ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from services.conductor.generation import Dispatcher, Generation, Token
from shared.errors import AttemptFailed
from shared.telemetry import held_gauge

QUEUED = 64  # tokens that wait here for a slow reader; more wait in the dispatcher


class Step(NamedTuple):
    choice: int
    token: Token


class Generations:
    """Async context manager; leaving it closes what still runs and waits until it is closed."""

    def __init__(self, dispatcher: Dispatcher, generations: Sequence[Generation]) -> None:
        self._dispatcher = dispatcher
        self._generations = generations
        self._queue: asyncio.Queue[Step | BaseException] = asyncio.Queue(QUEUED)
        self._tasks: list[asyncio.Task[None]] = []
        self._gauge = held_gauge("gateway_generations")

    async def __aenter__(self) -> Generations:
        self._tasks = [
            asyncio.create_task(self._pump(choice, generation), name=f"generation {generation.id}")
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
        first = await self._queue.get()
        steps: list[Step] = []
        while True:
            if isinstance(first, BaseException):
                if not steps:
                    raise first
                self._queue.put_nowait(first)  # there is room: it was just taken out
                return steps
            steps.append(first)
            if self._queue.empty():
                return steps
            first = self._queue.get_nowait()

    def end(self, choice: int) -> None:
        """Cancel one of them; its tokens that are queued still come."""
        self._tasks[choice].cancel()

    async def _pump(self, choice: int, generation: Generation) -> None:
        """To the iterator's own end: one that is closed behind its last token would count as cancelled."""
        self._gauge.inc()
        stream, finish = self._dispatcher.generate(generation), ""
        try:
            async for token in stream:
                finish = token.output.finish
                await self._queue.put(Step(choice, token))
            if not finish:
                raise AttemptFailed("the generation ended without a finish reason")
        except Exception as error:
            await self._queue.put(error)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
            self._gauge.dec()
