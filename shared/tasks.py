"""Ending tasks for sure."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN = 0.2


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
