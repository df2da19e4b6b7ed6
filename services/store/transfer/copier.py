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
Refused = dict[int, MooncakeError]


def read(piece: Slice) -> Refused:
    """Copy a slice, then check it as far as the mapping allows (``gen_last``); which of its pieces failed, and why."""
    try:
        _read(piece, piece.offset, piece.length)
    except MooncakeError as e:
        return {0: e} if len(piece.pieces()) == 1 else _each(piece)
    return {}


def _each(piece: Slice) -> Refused:
    refused: Refused = {}
    for number, (offset, length) in enumerate(piece.pieces()):
        try:
            _read(piece, offset, length)
        except MooncakeError as e:
            refused[number] = e
    return refused


def _read(piece: Slice, at: int, length: int) -> None:
    mapping, local, request = piece.job.mapping, piece.job.local, piece.job.request
    assert mapping is not None and local is not None
    mapping.check(request.offset + at, length)
    copy(local.address + request.local_offset + at, mapping.address + request.offset + at, length)
    mapping.verify(request.offset + at, length, request.grant)


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

    def settle(self, piece: Slice, refused: Refused) -> None:
        """Under the lock. A slice was copied; where the owner has the last word, that is on refused pieces too."""
        if piece.job.error is None and piece.job.mapping is not None and piece.job.mapping.asks:
            piece.kind = Kind.VERIFY
            self._ask(piece)
        else:
            piece.settle(piece.job.error, refused)

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        piece = self._take()
        if piece is None:
            return False
        refused = read(piece)
        with self._work:
            self.settle(piece, refused)
        return True

    def _take(self) -> Slice | None:
        with self._work:
            while not self._queue and not self._closed:
                self._work.wait()
            return self._queue.popleft() if self._queue else None

    def close(self, error: MooncakeError) -> threading.Thread | None:
        """Fail what is queued. The thread, to be joined: it ends with the copy that it is at."""
        with self._work:
            self._closed = True
            for piece in self._queue:
                piece.settle(error)
            self._queue.clear()
            self._work.notify_all()
        return self._thread
