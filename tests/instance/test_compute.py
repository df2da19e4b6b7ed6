"""The compute thread, and waiting that no cancellation cuts short."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from shared.instance.compute import ComputeThread
from shared.tasks import settle


async def test_steps_run_in_order_on_one_thread() -> None:
    compute, seen = ComputeThread("t"), list[tuple[int, int]]()
    await asyncio.gather(
        *(compute.run(partial(lambda i: seen.append((i, threading.get_ident())), i)) for i in range(5))
    )
    assert [i for i, _ in seen] == list(range(5))
    assert len({thread for _, thread in seen}) == 1 and seen[0][1] != threading.get_ident()
    assert (compute.progress, compute.busy) == (5, False)
    compute.close()


async def test_a_failed_step_raises_and_the_thread_goes_on() -> None:
    compute = ComputeThread("t")
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    assert await compute.run(lambda: 7) == 7
    compute.close()


async def test_a_cancelled_caller_is_kept_until_its_step_is_over() -> None:
    compute, go, over = ComputeThread("t"), threading.Event(), threading.Event()

    def step() -> None:
        go.wait(100)
        over.set()

    task = asyncio.ensure_future(compute.run(step))
    await asyncio.sleep(0.02)
    assert compute.busy
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert over.is_set()
    compute.close()


async def test_a_step_that_has_not_begun_is_taken_back() -> None:
    compute, go, ran = ComputeThread("t"), threading.Event(), list[int]()
    first = asyncio.ensure_future(compute.run(lambda: go.wait(100)))
    second = asyncio.ensure_future(compute.run(lambda: ran.append(1)))
    await asyncio.sleep(0.02)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go.set()
    await first
    await compute.run(lambda: None)
    assert ran == []
    compute.close()


async def test_settle_waits_then_raises_the_cancellation() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(settle(future))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    future.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await task
    await settle(future)
