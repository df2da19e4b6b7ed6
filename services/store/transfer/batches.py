"""Batches of requests, requests under way (jobs) and the slices they travel in. Pure; the engine's lock guards them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from services.store.transfer.base import Request, Result, Status
from services.store.transfer.segments import Segment
from services.store.transfer.wire import KIB, MIB, Kind, SegmentRef
from shared.errors import InvalidInput, MooncakeError

if TYPE_CHECKING:
    from services.store.transfer.mapping import Mapping

SLICE_FLOOR = 16 * KIB
SLICE_CEILING = 4 * MIB


class Job:
    """One request. It ends when its last slice is settled, so that a job that failed has nothing left in flight
    that could touch its memory (``dest_held``). ``local`` is None when the request was wrong from the start."""

    __slots__ = ("batch", "error", "local", "mapping", "moved", "open", "request", "status", "transport")

    def __init__(self, batch: Batch, request: Request, local: Segment | None) -> None:
        self.batch = batch
        self.request = request
        self.local = local
        self.status = Status.WAITING
        self.transport = ""
        self.mapping: Mapping | None = None
        self.error: MooncakeError | None = None
        self.moved = 0
        self.open = 0

    def result(self) -> Result:
        error = self.error if self.status is Status.FAILED else None
        return Result(self.status, self.transport, self.moved, error)

    def finish(self, error: MooncakeError | None = None) -> None:
        """Nothing of it is in flight any more."""
        self.error = self.error or error
        self.status = Status.FAILED if self.error else Status.COMPLETED
        self.batch.one_finished(self)


class Slice:
    """``length`` bytes at ``offset`` of a job's request. ``kind`` says how it travels next."""

    __slots__ = ("attempts", "job", "kind", "length", "offset", "source", "target")

    def __init__(self, job: Job, kind: Kind, offset: int, length: int, target: SegmentRef) -> None:
        self.job = job
        self.kind = kind
        self.offset = offset
        self.length = length
        self.target = target
        self.source: SegmentRef | None = None
        self.attempts = 0

    def settle(self, error: MooncakeError | None = None) -> bool:
        """Its outcome is known and it is nowhere any more. True when that ended the job."""
        job = self.job
        job.open -= 1
        if error is None:
            job.moved += self.length
        else:
            job.error = job.error or error
        if job.open == 0:
            job.finish()
        return job.open == 0


class Batch:
    """Up to ``size`` requests that are waited for together."""

    def __init__(self, number: int, size: int, on_finished: Callable[[Job], None]) -> None:
        self.number = number
        self.size = size
        self.jobs: list[Job] = []
        self.unfinished = 0
        self.waiting: list[Callable[[], None]] = []
        self._on_finished = on_finished

    def add(self, request: Request, local: Segment | None, error: MooncakeError | None = None) -> Job:
        if len(self.jobs) >= self.size:
            raise InvalidInput(f"batch {self.number} has room for {self.size} requests", field="requests")
        job = Job(self, request, local)
        job.error = error
        self.jobs.append(job)
        self.unfinished += 1
        return job

    def one_finished(self, job: Job) -> None:
        self._on_finished(job)
        self.unfinished -= 1
        if not self.unfinished:
            waiting, self.waiting = self.waiting, []
            for tell in waiting:
                tell()

    def when_finished(self, tell: Callable[[], None]) -> None:
        """``tell`` is called once nothing is unfinished, maybe now."""
        if self.unfinished:
            self.waiting.append(tell)
        else:
            tell()

    def results(self) -> list[Result]:
        return [job.result() for job in self.jobs]


class BatchTable:
    """The batches that callers hold by number."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._batches: dict[int, Batch] = {}

    def allocate(self, size: int, on_finished: Callable[[Job], None]) -> Batch:
        if size < 0:
            raise InvalidInput("a batch has room for 0 or more requests", field="size")
        batch = Batch(next(self._numbers), size, on_finished)
        self._batches[batch.number] = batch
        return batch

    def get(self, number: int) -> Batch:
        if number not in self._batches:
            raise InvalidInput(f"no batch {number}", field="batch")
        return self._batches[number]

    def result(self, number: int, index: int) -> Result:
        jobs = self.get(number).jobs
        if not 0 <= index < len(jobs):
            raise InvalidInput(f"batch {number} has {len(jobs)} requests, not one numbered {index}", field="index")
        return jobs[index].result()

    def free(self, number: int) -> None:
        if self.get(number).unfinished:
            raise InvalidInput(f"batch {number} has requests in flight", field="batch")
        del self._batches[number]

    def __len__(self) -> int:
        return len(self._batches)

    def unfinished(self) -> int:
        return sum(batch.unfinished for batch in self._batches.values())


def slice_size(length: int, queued: int, streams: int) -> int:
    """Bytes to cut a request of ``length`` into when ``queued`` bytes wait already for ``streams`` streams.

    One stream saturates memory copies, so a request is only spread when every stream gets slices worth their round
    trip; the deeper the queue, the larger the slices.
    """
    share = (length + queued) // (2 * max(1, streams))
    return max(SLICE_FLOOR, min(SLICE_CEILING, max(share, 2 * MIB if streams > 1 else SLICE_CEILING)))


def cut(length: int, size: int) -> Sequence[tuple[int, int]]:
    """(offset, length) of the pieces of at most ``size`` bytes, about equal, on multiples of the floor."""
    pieces = -(-length // size)
    step = -(-length // pieces // SLICE_FLOOR) * SLICE_FLOOR if pieces > 1 else length
    return [(at, min(step, length - at)) for at in range(0, length, step)]
