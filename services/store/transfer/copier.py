"""Mapped READs: copies out of a peer's memory on a thread of their own, then the check that they were of the right
block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from services.store.transfer.batches import Job, Slice
from services.store.transfer.copying import copy
from services.store.transfer.wire import Kind
from shared.errors import MooncakeError

Ask = Callable[[Slice], None]


def read(piece: Slice) -> MooncakeError | None:
    """Copy a slice, then check it as far as the mapping allows (``gen_last``)."""
    mapping, local, request = piece.job.mapping, piece.job.local, piece.job.request
    assert mapping is not None and local is not None
    offset = request.offset + piece.offset
    target = local.address + request.local_offset + piece.offset
    try:
        mapping.check(offset, piece.length)
        copy(target, mapping.address + offset, piece.length)
        mapping.verify(offset, piece.length, request.grant)
    except MooncakeError as e:
        return e
    return None


class Copier:
    """One thread, started on first use. ``lock`` is the engine's; ``ask`` is called, under it, with each copied slice
    whose owner has the last word."""

    def __init__(self, lock: threading.Lock, ask: Ask) -> None:
        self._work = threading.Condition(lock)
        self._ask = ask
        self._queue: deque[Slice] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, slices: Iterable[Slice]) -> None:
        """Under the lock."""
        self._queue.extend(slices)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="transfer-copy", daemon=True)
            self._thread.start()
        self._work.notify()

    def drop(self, jobs: set[Job]) -> None:
        """Under the lock. Slices of jobs that were given up; one being copied settles by itself, within a slice's
        time."""
        over = [piece for piece in self._queue if piece.job in jobs]
        self._queue = deque(piece for piece in self._queue if piece.job not in jobs)
        for piece in over:
            piece.settle(piece.job.error)

    def settle(self, piece: Slice, error: MooncakeError | None) -> None:
        """Under the lock. A slice was copied."""
        if error is None and piece.job.mapping is not None and piece.job.mapping.asks and piece.job.error is None:
            piece.kind = Kind.VERIFY
            self._ask(piece)
        else:
            piece.settle(piece.job.error or error)

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        piece = self._take()
        if piece is None:
            return False
        error = read(piece)
        with self._work:
            self.settle(piece, error)
        return True

    def _take(self) -> Slice | None:
        with self._work:
            while not self._queue and not self._closed:
                self._work.wait()
            return self._queue.popleft() if self._queue else None

    def close(self) -> threading.Thread | None:
        """The thread, to be joined: it ends with the copy it is at, once the queue was dropped."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        return self._thread
