"""Blocking work on a thread of its own, awaited from the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Runs ``work``, which must have a deadline of its own, on a new thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def off_loop(work: Callable[[], T], name: str, drop: Callable[[T], None]) -> T:
    """As ``in_thread``; when the awaiting task is cancelled, a later result goes to ``drop``."""
    future = in_thread(work, name)
    result = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        result.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else will look
        future.add_done_callback(lambda done: drop(done.result()) if done.exception() is None else None)
        raise
