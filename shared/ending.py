"""How a process ends: handing over once it is up, at once before that, and never slowly."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from shared.telemetry import log

GIVE_UP_S = 2.0
"""For what is under way in a process that is told to stop before it is up."""

logger = log("process")


async def until_told(serving: asyncio.Task[None], told: asyncio.Event, up: Callable[[], bool]) -> None:
    """Waits for ``serving``, which hands over and ends once it is ``told``; raises what it raises.

    What is not ``up`` when told has nothing to hand over. It is cancelled, and hardly waited for, since a library that
    is being loaded cannot be stopped. The process had better :func:`leave` then, from inside its loop.
    """
    telling = asyncio.create_task(told.wait())
    await asyncio.wait([serving, telling], return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    if up() or serving.done():
        await serving
    else:
        serving.cancel()
        await asyncio.wait([serving], timeout=GIVE_UP_S)
        logger.info("stopped before it was ready")


def leave(code: int) -> NoReturn:
    """End the process now. What registered for the exit runs (traces are flushed); what takes seconds on a busy
    machine does not: taking an engine's library apart, waiting for threads that still load something."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
