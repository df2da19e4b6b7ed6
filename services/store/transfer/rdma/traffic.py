"""All that RDMA carries towards one peer: what is queued, in flight and lost, on which pair of NICs. Pure.

A cargo is in exactly one place: waiting (every NIC rests), queued or flying on a lane, or lost with one (a WRITE of a
broken queue pair, until the target has destroyed its end: then nothing of it can land any more, ``all_completions``).
The engine's lock guards it; time is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count

from services.store.transfer.base import Op, Status
from services.store.transfer.batches import Job
from services.store.transfer.ledger import Ledger
from services.store.transfer.metrics import RETRIED
from services.store.transfer.rdma.cargo import Cargo
from services.store.transfer.rdma.nic import UNBOUNDED
from services.store.transfer.topology.health import Fault
from services.store.transfer.topology.paths import Path, Paths
from shared.errors import Fenced, MooncakeError, PeerGone

ATTEMPTS = 8
"""Paths on which one slice may fail; deadlines come first in most cases."""

Arrived = Callable[[Cargo], None]
Location = Callable[[Cargo], tuple[str, str]]
"""Of a cargo's memory here and there."""


class Lane:
    """One queue pair, or the wish for one. ``number`` tells it from all others of this agent; ``moved``: when something
    last arrived. ``reading``: bytes of the READs that fly."""

    __slots__ = ("flying", "moved", "number", "path", "queue", "reading", "sent")

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self.queue: deque[Cargo] = deque()
        self.flying: deque[tuple[int, Cargo]] = deque()
        self.sent = 0
        self.reading = 0
        self.moved = 0.0

    def __len__(self) -> int:
        return len(self.queue) + len(self.flying)


class Lost:
    """WRITEs of a broken lane: their grants count as in flight until it is reaped; those in ``cargos`` may go again."""

    def __init__(self, cargos: list[Cargo]) -> None:
        self.grants = [cargo.grant for cargo in cargos]
        self.cargos = cargos


_numbers = count(1)


class Traffic:
    """``arrived`` is told each cargo that has arrived, and settles it."""

    def __init__(self, paths: Paths, ledger: Ledger, location: Location, arrived: Arrived) -> None:
        self.paths = paths
        self.ledger = ledger
        self._location = location
        self._arrived = arrived
        self.lanes: dict[Path, Lane] = {}
        self.waiting: deque[Cargo] = deque()
        self.unreaped: dict[int, Lost] = {}

    # -- queueing -------------------------------------------------------------------------------------------

    def submit(self, cargos: Iterable[Cargo], now: float) -> None:
        for cargo in cargos:
            self._place(cargo, now)

    def _place(self, cargo: Cargo, now: float) -> None:
        here, there = self._location(cargo)
        path = self.paths.choose(here, there, now, cargo.tried)
        if path is None:
            self.waiting.append(cargo)
            return
        lane = self.lanes.get(path)
        if lane is None:
            lane = self.lanes[path] = Lane(path, next(_numbers))
        lane.queue.append(cargo)
        self.paths.posted(path, cargo.length)

    def retry(self, now: float) -> None:
        """Something may have stopped resting."""
        waiting, self.waiting = self.waiting, deque()
        self.submit(waiting, now)

    def ready_at(self) -> float | None:
        """When ``retry`` is worth a try. None: nothing waits."""
        if not self.waiting:
            return None
        return self.paths.ready_at(*self._location(self.waiting[0])) or 0.0

    def take(self, lane: Lane, most: int, window: int = UNBOUNDED) -> list[tuple[int, Cargo]]:
        """Cargos to post on the lane now, numbered. They are flying from here on. ``window``: bytes of READs that may
        fly; one READ always may."""
        taken: list[tuple[int, Cargo]] = []
        posted: dict[int, int] = {}
        queue, number = lane.queue, lane.sent
        while queue and len(taken) < most:
            cargo = queue[0]
            if not cargo.write and lane.reading and lane.reading + cargo.length > window:
                break
            queue.popleft()
            error = cargo.job.error or (self._refusal(cargo) if cargo.write else None)
            if error is not None:
                self._settle(lane.path, cargo, error)
                continue
            cargo.job.status = Status.PENDING
            if cargo.write:
                posted[cargo.grant] = posted.get(cargo.grant, 0) + 1
            else:
                lane.reading += cargo.length
            number += 1
            taken.append((number, cargo))
        lane.sent = number
        lane.flying.extend(taken)
        for grant, slices in posted.items():
            self.ledger.post(grant, slices)
        return taken

    # -- completions ----------------------------------------------------------------------------------------

    def completed(self, lane: Lane, number: int) -> dict[str, int]:
        """All up to ``number`` have arrived; how many bytes they are, by operation."""
        flying, over = lane.flying, list[Cargo]()
        while flying and flying[0][0] <= number:
            over.append(flying.popleft()[1])
        if not over:
            return {}
        landed: dict[int, int] = {}
        read = written = 0
        for cargo in over:
            if cargo.write:
                landed[cargo.grant] = landed.get(cargo.grant, 0) + 1
                written += cargo.length
            else:
                read += cargo.length
        for grant, slices in landed.items():
            self.ledger.land(grant, slices)
        lane.reading -= read
        self.paths.settled(lane.path, read + written, len(over))
        self.paths.worked(lane.path, read + written)
        for cargo in over:
            self._arrived(cargo)
        return {op.value: moved for op, moved in ((Op.READ, read), (Op.WRITE, written)) if moved}

    def refused(self, lane: Lane, number: int, error: MooncakeError) -> None:
        """The peer's NIC refused work ``number`` (the queue pair is broken with it): that one fails for good."""
        self.completed(lane, number - 1)
        if lane.flying and lane.flying[0][0] == number:
            _, cargo = lane.flying.popleft()
            if cargo.write:
                self.ledger.land(cargo.grant)  # not a byte of it was placed
            else:
                lane.reading -= cargo.length
            self.paths.settled(lane.path, cargo.length)
            cargo.refuse(error)

    def broken(self, lane: Lane, error: MooncakeError, fault: Fault | None, now: float) -> None:
        """Its queue pair is destroyed (or was never made). What it had goes elsewhere: what was queued and READs now,
        WRITEs that were flying when the target has let go. ``fault`` None: it was given up for another reason."""
        if self.lanes.get(lane.path) is lane:
            del self.lanes[lane.path]
        if fault is not None:
            self.paths.failed(lane.path, fault, now)
        flying, queue = [cargo for _, cargo in lane.flying], list(lane.queue)
        lane.flying.clear()
        lane.queue.clear()
        lane.reading = 0
        for cargo in (*flying, *queue):
            self.paths.settled(lane.path, cargo.length)
        failed = fault in (Fault.LINK, Fault.LOCAL)
        writes = [cargo for cargo in flying if cargo.write]
        if writes:
            self.unreaped[lane.number] = Lost(writes)
        for cargo in flying:
            if failed:
                cargo.tried.append(lane.path)
            if not cargo.write:
                self._again(cargo, error, now)
        for cargo in queue:
            self._again(cargo, error, now, counts=False)
        self._forget_over(error)

    def reaped(self, number: int, now: float) -> None:
        """The target destroyed its end: nothing of that lane can land any more."""
        lost = self.unreaped.pop(number, None)
        if lost is None:
            return
        for grant in lost.grants:
            self.ledger.land(grant)
        for cargo in lost.cargos:
            self._again(cargo, PeerGone("the queue pair was lost"), now)

    # -- giving up --------------------------------------------------------------------------------------------

    def refuse(self, grants: Iterable[int]) -> None:
        """Rule: writer_refuses. What is queued goes; what is in flight may not be sent again."""
        self.ledger.refuse(grants)
        self._drop(lambda cargo: self._refusal(cargo) is not None, _fenced())

    def grants(self) -> set[int]:
        """WRITE grants of all that is under way or awaits its outcome."""
        cargos = [*self.waiting, *(cargo for lane in self.lanes.values() for cargo in lane.queue)]
        return {cargo.grant for cargo in cargos if cargo.write} | self.ledger.outstanding()

    def expire(self, jobs: Iterable[Job], error: MooncakeError) -> list[Lane]:
        """Give jobs up. The lanes to destroy, on which some of them are flying; the rest is settled."""
        gone = {job for job in jobs if job.status in (Status.WAITING, Status.PENDING)}
        for job in gone:
            job.error = job.error or error
        self._drop(lambda cargo: cargo.job in gone, error)
        return [lane for lane in self.lanes.values() if any(cargo.job in gone for _, cargo in lane.flying)]

    def fail(self, error: MooncakeError) -> None:
        """Nothing can be carried: fail all that is not in flight."""
        self._drop(lambda cargo: True, error)

    def bury(self, now: float) -> None:
        """The peer's incarnation is over, and its memory with it: nothing can land there any more."""
        for number in list(self.unreaped):
            self.reaped(number, now)

    def under_way(self) -> bool:
        return bool(self.waiting or self.unreaped or any(len(lane) for lane in self.lanes.values()))

    # -- inside -----------------------------------------------------------------------------------------------

    def _refusal(self, cargo: Cargo) -> MooncakeError | None:
        refused = cargo.write and self.ledger.refuses(cargo.grant)
        return _fenced() if refused else None

    def _settle(self, path: Path, cargo: Cargo, error: MooncakeError) -> None:
        self.paths.settled(path, cargo.length)
        cargo.piece.settle(error)

    def _again(self, cargo: Cargo, error: MooncakeError, now: float, counts: bool = True) -> None:
        over = cargo.job.error or self._refusal(cargo)
        if over is None and len(cargo.tried) >= ATTEMPTS:
            over = PeerGone(f"failed on {ATTEMPTS} paths, at last: {error.message}")
        if over is not None:
            cargo.piece.settle(over)
            return
        if counts:
            RETRIED.inc()
        self._place(cargo, now)

    def _drop(self, which: Callable[[Cargo], bool], error: MooncakeError) -> None:
        over = [cargo for cargo in self.waiting if which(cargo)]
        self.waiting = deque(cargo for cargo in self.waiting if not which(cargo))
        for lane in self.lanes.values():
            mine = [cargo for cargo in lane.queue if which(cargo)]
            lane.queue = deque(cargo for cargo in lane.queue if not which(cargo))
            for cargo in mine:
                self.paths.settled(lane.path, cargo.length)
            over += mine
        for cargo in (*over, *self._lost(which)):
            cargo.piece.settle(error)

    def _lost(self, which: Callable[[Cargo], bool]) -> list[Cargo]:
        """Take cargos out of what awaits its outcome: their memory was let go of when the queue pair was destroyed."""
        over: list[Cargo] = []
        for lost in self.unreaped.values():
            over += [cargo for cargo in lost.cargos if which(cargo)]
            lost.cargos = [cargo for cargo in lost.cargos if not which(cargo)]
        return over

    def _forget_over(self, error: MooncakeError) -> None:
        for cargo in self._lost(lambda cargo: cargo.job.error is not None or self._refusal(cargo) is not None):
            cargo.piece.settle(cargo.job.error or self._refusal(cargo) or error)


def _fenced() -> Fenced:
    return Fenced("the landing was fenced")
