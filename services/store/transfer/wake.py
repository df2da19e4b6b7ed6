"""Telling the loop from a thread that something has come about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


def teller(future: asyncio.Future[None]) -> Callable[[], None]:
    """Sets a future, from any thread, any number of times."""
    loop = future.get_loop()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_set, future)

    return tell


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
