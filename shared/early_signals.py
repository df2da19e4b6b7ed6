"""Signals to stop that come before a process can do anything about them. Imports next to nothing."""

from __future__ import annotations

import os
import signal
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT)
BY_SIGNAL = 128
"""Added to a signal's number: the exit code of what it ended, as shells have it."""


def end_when_told() -> None:
    """First thing in a process, before the imports that take seconds: a signal to stop ends it, until somebody else
    handles these signals.

    By default the kernel does that, except for the first process of a container: what that one does not handle never
    reaches it. Images start us with the signals blocked (``env --block-signal``), so that one sent before this call
    waits for it.
    """
    if os.getpid() == 1:
        for number in STOPPING:
            signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(BY_SIGNAL + number)
