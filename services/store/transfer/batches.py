"""Batches of requests, requests under way (jobs) and the slices they travel in. Pure; the engine's lock guards them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Mapping as Mapping_
from itertools import count
from typing import TYPE_CHECKING

from services.store.transfer.base import Request, Result, Status
from services.store.transfer.segments import Segment
from services.store.transfer.wire import MIB, Kind, SegmentRef
from shared.errors import InvalidInput, MooncakeError

if TYPE_CHECKING:
    from services.store.transfer.mapping import Mapping

MERGED = MIB
"""Requests up to this many bytes are carried together with their neighbours."""


class Job:
    """A run of ``count`` requests of ``step`` bytes each that follow each other at both ends (mostly just one).

    It ends when its last slice is settled, so that a job that failed has nothing left in flight that could touch its
    memory (``dest_held``). ``request`` is the first of the run; ``local`` is None when that was wrong from the start.
    """

    __slots__ = (
        "batch",
        "count",
        "error",
        "first",
        "length",
        "local",
        "mapping",
        "moved",
        "open",
        "refused",
        "request",
        "status",
        "step",
        "transport",
    )

    def __init__(self, batch: Batch, first: int, request: Request, local: Segment | None) -> None:
        self.batch = batch
        self.first = first
        self.request = request
        self.local = local
        self.count = 1
        self.step = self.length = request.length
        self.status = Status.WAITING
        self.transport = ""
        self.mapping: Mapping | None = None
        self.error: MooncakeError | None = None
        self.refused: dict[int, MooncakeError] = {}
        self.moved = 0
        self.open = 0

    def takes(self, request: Request) -> bool:
        """Make ``request`` the next of the run, if it is. Each stays a request of its own for the target's guard."""
        mine, local = self.request, self.local
        if (
            request.length != self.step
            or request.offset != mine.offset + self.length
            or request.local_offset != mine.local_offset + self.length
            or request.grant != mine.grant
            or request.op is not mine.op
            or self.error is not None
            or self.step > MERGED
            or local is None
            or request.local_offset + self.step > local.size
            or request.local != mine.local
            or request.segment != mine.segment
            or request.peer != mine.peer
        ):
            return False
        self.count += 1
        self.length += self.step
        return True

    def result(self, index: int) -> Result:
        """Of the request that is number ``index`` of the run."""
        if self.status in (Status.WAITING, Status.PENDING):
            return Result(self.status, self.transport)
        error = self.error or self.refused.get(index)
        if error is not None:
            return Result(Status.FAILED, self.transport, self.moved if self.count == 1 else 0, error)
        return Result(Status.COMPLETED, self.transport, self.step)

    def all_results(self) -> list[Result]:
        if self.count > 1 and self.error is None and not self.refused:
            return [self.result(0)] * self.count
        return [self.result(index) for index in range(self.count)]

    def finish(self, error: MooncakeError | None = None) -> None:
        """Nothing of it is in flight any more."""
        self.error = self.error or error
        self.status = Status.FAILED if self.error else Status.COMPLETED
        self.batch.one_finished(self)


class Slice:
    """``length`` bytes at ``offset`` of a job, whole steps of it where it is a run. ``kind``: how it travels next."""

    __slots__ = ("attempts", "job", "kind", "length", "offset", "source", "target")

    def __init__(self, job: Job, kind: Kind, offset: int, length: int, target: SegmentRef) -> None:
        self.job = job
        self.kind = kind
        self.offset = offset
        self.length = length
        self.target = target
        self.source: SegmentRef | None = None
        self.attempts = 0

    @property
    def count(self) -> int:
        """Requests that it carries, the last perhaps in part."""
        return self.length // self.job.step or 1

    def pieces(self) -> list[tuple[int, int]]:
        """(offset in the job, length) of each request's part in this slice."""
        step = min(self.job.step, self.length)
        return [(at, step) for at in range(self.offset, self.offset + self.length, step)]

    def settle(self, error: MooncakeError | None = None, refused: Mapping_[int, MooncakeError] | None = None) -> None:
        """Its outcome is known and it is nowhere any more. ``refused``: which of its pieces failed alone."""
        job = self.job
        job.open -= 1
        if error is not None:
            job.error = job.error or error
        elif refused:
            job.moved += self.length - len(refused) * min(job.step, self.length)
            first = self.offset // job.step
            for index, why in refused.items():
                job.refused.setdefault(first + index, why)
        else:
            job.moved += self.length
        if job.open == 0:
            job.finish()


class Batch:
    """Up to ``size`` requests that are waited for together."""

    def __init__(self, number: int, size: int, on_finished: Callable[[Job], None]) -> None:
        self.number = number
        self.size = size
        self.filled = 0
        self.jobs: list[Job] = []
        self.unfinished = 0
        self.waiting: list[Callable[[], None]] = []
        self._on_finished = on_finished

    def add(self, request: Request, local: Segment | None, error: MooncakeError | None = None) -> Job:
        """A job for the next request; ``filled`` grows with the requests that it takes besides."""
        job = Job(self, self.filled, request, local)
        job.error = error
        self.jobs.append(job)
        self.filled += 1
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

    def result(self, index: int) -> Result:
        if not 0 <= index < self.filled:
            raise InvalidInput(f"batch {self.number} has no request {index}, only {self.filled}", field="index")
        job = self.jobs[bisect_right(self.jobs, index, key=lambda job: job.first) - 1]
        return job.result(index - job.first)

    def results(self) -> list[Result]:
        return [result for job in self.jobs for result in job.all_results()]


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

    def free(self, number: int) -> None:
        if self.get(number).unfinished:
            raise InvalidInput(f"batch {number} has requests in flight", field="batch")
        del self._batches[number]

    def __len__(self) -> int:
        return len(self._batches)

    def unfinished(self) -> int:
        return sum(batch.unfinished for batch in self._batches.values())
