"""Waiting for tasks and ending them, for sure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

AGAIN = 0.2

T = TypeVar("T")


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel ``tasks`` and wait until they are done, whatever they raise. Libraries swallow a cancellation at times
    (redis-py does, when it comes together with an answer): then it comes again."""
    left = {task for task in tasks if task is not None}
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN)
        for task in done:
            if not task.cancelled():
                task.exception()


async def settle(future: asyncio.Future[Any]) -> None:
    """Wait until ``future`` is done, however often the caller is cancelled meanwhile; a cancellation is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as e:
            cancelled = e
    if cancelled is not None:
        raise cancelled


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of ``work``, for which a cancelled caller is kept: until then the memory it touches must stay its."""
    future = asyncio.ensure_future(work)
    try:
        await settle(future)
    except asyncio.CancelledError:
        if not future.cancelled():
            future.exception()  # nobody else will look
        raise
    return future.result()
