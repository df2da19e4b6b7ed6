from __future__ import annotations

import asyncio

from shared.tasks import end


async def test_a_task_that_swallows_cancellations_ends_all_the_same() -> None:
    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
        await asyncio.sleep(3600)

    async def fails() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise KeyError("on the way out")

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    await end(*tasks, None)
    assert all(task.done() for task in tasks)
