"""The check of one-sided READs: the generations of the slots are read after all slices have arrived (``gen_last``)."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable

import numpy as np

from services.store.transfer.batches import Job, Slice
from services.store.transfer.rdma.cargo import Cargo
from services.store.transfer.rdma.reach import Place, Reach
from shared.errors import StaleGeneration

CELL = 64
"""Generations that are read at one time for one job."""
CELLS = 256


class Checks:
    """Cells of registered memory, one for each job under check. ``keys``: of that memory, by NIC."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, CELLS * CELL * 8)
        self._words = np.frombuffer(self.memory, np.uint64)
        self.address = int(self._words.ctypes.data)
        self.size = CELLS * CELL * 8
        self.keys: dict[str, int] = {}
        self._free = list(range(CELLS))
        self._held: dict[Job, int] = {}
        self._waiting: deque[tuple[Slice, Reach, Callable[[Cargo], None]]] = deque()

    def begin(self, piece: Slice, reach: Reach, send: Callable[[Cargo], None]) -> None:
        """``piece`` is the last of its job to arrive; it is settled when its check is over. ``send`` sends what has to
        be read, maybe later."""
        if not self._free:
            self._waiting.append((piece, reach, send))
            return
        self._held[piece.job] = self._free.pop()
        request = piece.job.request
        slots = reach.slots(request.offset, piece.job.length)
        send(self._cargo(piece, reach, slots.start, slots.stop))

    def _cargo(self, piece: Slice, reach: Reach, first: int, stop: int) -> Cargo:
        slots = range(first, min(stop, first + CELL))
        here = Place(self.address + self._held[piece.job] * CELL * 8, self.keys)
        return Cargo(piece, reach, here, reach.words(slots), 8 * len(slots), slots)

    def arrived(self, cargo: Cargo, send: Callable[[Cargo], None]) -> None:
        """The generations are here: compare them, read the next ones, or settle."""
        assert cargo.slots is not None
        job, request = cargo.job, cargo.request
        at = self._held[job] * CELL
        for index in np.flatnonzero(self._words[at : at + len(cargo.slots)] != np.uint64(request.grant)):
            self._stale(job, cargo.reach, cargo.slots[int(index)])
        last = cargo.reach.slots(request.offset, job.length).stop
        if cargo.slots.stop < last and job.error is None:
            send(self._cargo(cargo.piece, cargo.reach, cargo.slots.stop, last))
        else:
            cargo.piece.settle(job.error)

    def _stale(self, job: Job, reach: Reach, slot: int) -> None:
        """Requests of the run that touch the slot fail."""
        assert reach.table is not None
        begin = slot * reach.table.slot_bytes - job.request.offset
        first = max(0, begin // job.step)
        last = min(job.count - 1, (begin + reach.table.slot_bytes - 1) // job.step)
        for number in range(first, last + 1):
            if number not in job.refused:
                job.refused[number] = StaleGeneration(f"slot {slot} was reused since it was leased")
                job.moved -= job.step

    def over(self, job: Job) -> None:
        """The job has ended, however: its cell is free."""
        cell = self._held.pop(job, None)
        if cell is None:
            return
        self._free.append(cell)
        while self._waiting and self._free:
            piece, reach, send = self._waiting.popleft()
            if piece.job.error is None:
                self.begin(piece, reach, send)
            else:
                piece.settle(piece.job.error)

    def drop(self, jobs: set[Job]) -> None:
        """Jobs that were given up and still wait for a cell."""
        over = [entry for entry in self._waiting if entry[0].job in jobs]
        self._waiting = deque(entry for entry in self._waiting if entry[0].job not in jobs)
        for piece, _, _ in over:
            piece.settle(piece.job.error)

    @property
    def held(self) -> int:
        return len(self._held)
