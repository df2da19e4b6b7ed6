"""RDMA work requests of this process: how many it posts, and how long that takes it, without the devices' part."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

PAUSE = 0.1
"""Seconds in which the software NIC has done what it was given."""


class Posting:
    """While the block runs: counts the work requests that this process posts, and the seconds that it spends on
    posting, polling and accounting them. Afterwards all is as before: whoever posts then waits for no PAUSE.

    The software NIC works on the processor that is measured, in system calls and interrupts. So it gets a PAUSE
    whenever it was given something, and the system calls in which it is asked are left out: there a NIC in hardware
    rings a bell. A look at the clock is a system call, too, and dear in the guest: what it takes is measured first, and
    subtracted.
    """

    PACKAGE = "services.store.transfer.rdma."
    OURS = (("outgoing", "Outgoing", "_post"), ("poller", "Poller", "_drain"))
    DEVICE = (("queue_pair", "QueuePair", "_ring"), ("queue_pair", "QueuePair", "working"))

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._plain: list[tuple[Any, str, Any]] = []
        looks = [time.perf_counter() for _ in range(2000)]
        self._clock = statistics.median(after - before for before, after in pairwise(looks))

    def __enter__(self) -> Posting:
        for where in self.OURS:
            self._time(*where, inner=False)
        for where in self.DEVICE:
            self._time(*where, inner=True)
        self._count()
        return self

    def __exit__(self, *_: object) -> None:
        while self._plain:
            setattr(*self._plain.pop())

    def _replace(self, owner: Any, name: str, timed: Any) -> None:
        self._plain.append((owner, name, getattr(owner, name)))
        setattr(owner, name, timed)

    def _time(self, module: str, kind: str, name: str, inner: bool) -> None:
        owner = getattr(importlib.import_module(self.PACKAGE + module), kind)
        plain, clock = getattr(owner, name), self._clock

        def timed(*args: object) -> object:
            began = time.perf_counter()
            try:
                return plain(*args)
            finally:
                if name == "_ring":
                    time.sleep(PAUSE)
                took = time.perf_counter() - began
                self.seconds += -took - clock if inner else took - clock  # the outer one saw both looks of the inner

        self._replace(owner, name, timed)

    def _count(self) -> None:
        pairs: Any = importlib.import_module(self.PACKAGE + "queue_pair").QueuePair
        plain = pairs.post

        def post(pair: object, works: Sequence[object]) -> None:
            self.count += len(works)
            plain(pair, works)

        self._replace(pairs, "post", post)
