"""All that is under way from this agent to one peer: queued slices, the streams that carry them, the grants' account.

The engine's lock guards it; streams wait on ``work``. A slice is in exactly one place: parked with its job (not yet
assigned to a transport), queued, carried by a stream, or lost with one (waiting until the target has said that
nothing of that stream can land any more, ``all_completions``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.store.transfer.base import Op, Peer, Status
from services.store.transfer.batches import Job, Slice
from services.store.transfer.ledger import Ledger
from services.store.transfer.metrics import RETRIED, SECOND_CHOICE
from services.store.transfer.wire import MAX_PIECES, MIB, Kind
from shared.errors import Fenced, MooncakeError, NoTransport, PeerGone
from shared.messages import Ref

FRAME_BYTES = 16 * MIB
"""Larger frames than slices: between two frames a stream waits for Python, twice at each end."""
FRAME_SLICES = 512
ATTEMPTS = 4


class Carrier(Protocol):
    """What a link knows of a stream."""

    id: int
    ending: bool

    def wake(self) -> None:
        """It was resting: there is work to take."""

    def start(self, pieces: list[Slice]) -> bool:
        """It was resting: send their frame here and now, as far as that does not block. False: its connection had ended
        before, nothing was sent."""

    def lend(self) -> bool:
        """It was resting: may whoever asks ``carry`` a frame in its place? It counts on that from here on."""

    def carry(self, pieces: list[Slice]) -> bool:
        """It was lent: send their frame and receive its answer, here and now. True: all bytes are where they belong.
        False: it takes longer than is worth waiting for, or something was refused; they are under way, on its thread.
        Not under the lock."""

    def destroy(self) -> None:
        """End it soon, from any thread; it reports by ``Link.lost`` when it has let go of all memory."""


WRITES = (Kind.WRITE, Kind.PULL)
SMALL = 32
"""So few slices without payload are sent by whoever submits them: a stream's thread then wakes once, to the answer."""
Refusals = dict[int, dict[int, MooncakeError]]
"""Index of a slice in its frame -> piece in the slice -> why."""


@dataclass
class Lost:
    """What a stream that ended had sent without an answer: ``grants`` count as in flight until it is reaped, ``pieces``
    may go again then."""

    grants: list[int]
    pieces: list[Slice]

    def settle(self, which: Callable[[Slice], bool], error: MooncakeError) -> None:
        over = [piece for piece in self.pieces if which(piece)]
        self.pieces = [piece for piece in self.pieces if piece not in over]
        for piece in over:
            piece.settle(error)


class Link:
    """Towards one incarnation of one peer. ``push``: a WRITE that the target cannot pull may go over TCP instead."""

    def __init__(self, ref: Ref, lock: threading.Lock, push: bool) -> None:
        self.ref = ref
        self._push = push
        self.work = threading.Condition(lock)
        self.peer: Peer | None = None
        self.ledger = Ledger()
        self.parked: list[Job] = []
        self.queue: deque[Slice] = deque()
        self.queued_bytes = 0
        self.carried: dict[Carrier, dict[Slice, None]] = {}
        self.resting: dict[Carrier, None] = {}
        self.unreaped: dict[int, Lost] = {}
        self.pullable = True

    # -- the submitter ------------------------------------------------------------------------------------

    def park(self, job: Job) -> None:
        self.parked.append(job)

    def submit(self, slices: Sequence[Slice]) -> None:
        """Queue slices of jobs that have a transport now, and get streams going."""
        self.enqueue(slices)
        self.rouse()

    def enqueue(self, slices: Sequence[Slice]) -> None:
        """Who calls this calls ``rouse`` as well."""
        for piece in slices:
            self.queue.append(piece)
            self.queued_bytes += piece.length

    def lend(self) -> Carrier | None:
        """A stream that rests, for somebody to ``carry`` a frame; None: other work is under way, or they would wait in
        vain."""
        if self.queue or not self.resting or any(self.carried.values()):
            return None
        carrier = next(iter(self.resting))
        if carrier.ending or not carrier.lend():
            return None
        del self.resting[carrier]
        return carrier

    def adopt(self, carrier: Carrier, pieces: Sequence[Slice]) -> None:
        """What was sent, and is not over, on a stream that was lent."""
        for piece in pieces:
            job = piece.job
            job.status, job.open = Status.PENDING, 1
            self._post(carrier, piece)

    def rouse(self) -> None:
        """Get streams going that rest: one, and one more for each frame that waits."""
        if not (self.queue and self.resting):
            return
        wanted = 1 + self.queued_bytes // FRAME_BYTES
        while wanted and self.queue and self.resting:
            carrier = next(iter(self.resting))
            del self.resting[carrier]
            if self.queue[0].kind is Kind.WRITE or len(self.queue) > SMALL or carrier.ending:
                carrier.wake()
            elif not carrier.start(pieces := self._frame(carrier)):
                self.give_back(carrier, pieces)
                continue
            wanted -= 1

    def refuse(self, grants: Iterable[int]) -> None:
        """Rule: writer_refuses. Drops what is not in flight; what is may not be sent again."""
        self.ledger.refuse(grants)
        for job in [job for job in self.parked if self.refuses(job)]:
            self.parked.remove(job)
            job.finish(_fenced())
        self._drop(lambda piece: self.refuses(piece.job), _fenced())
        for lost in self.unreaped.values():
            lost.settle(lambda piece: self.refuses(piece.job), _fenced())

    def refuses(self, job: Job) -> bool:
        return job.request.op is Op.WRITE and self.ledger.refuses(job.request.grant)

    def grants(self) -> set[int]:
        """WRITE grants of all that is under way or awaits its outcome."""
        jobs = [*self.parked, *(piece.job for piece in self.queue)]
        return {job.request.grant for job in jobs if job.request.op is Op.WRITE} | self.ledger.outstanding()

    def expire(self, jobs: Iterable[Job], error: MooncakeError) -> None:
        """Give jobs up: what is queued goes now, what is in flight as soon as its stream is destroyed."""
        gone = {job for job in jobs if job.status in (Status.WAITING, Status.PENDING)}
        for job in gone:
            job.error = job.error or error
        for job in [job for job in self.parked if job in gone]:
            self.parked.remove(job)
            job.finish()
        self._drop(lambda piece: piece.job in gone, error)
        for lost in self.unreaped.values():  # their memory was let go of when the stream ended
            lost.settle(lambda piece: piece.job in gone, error)
        for carrier, carried in self.carried.items():
            if any(piece.job in gone for piece in carried):
                carrier.destroy()

    def fail(self, error: MooncakeError) -> None:
        """Nothing can be carried: fail all that waits."""
        parked, self.parked = self.parked, []
        for job in parked:
            job.finish(error)
        self._drop(lambda piece: True, error)
        for lost in self.unreaped.values():
            lost.settle(lambda piece: True, error)

    def judge(self, known: Iterable[int], live: Sequence[int] | None) -> None:
        """Rule: handshake. A new stream learnt the ``live`` grants; ``known`` were ours before it asked."""
        if live is not None:
            self.refuse(set(known) - set(live))

    def bury(self) -> None:
        """The peer's incarnation is over, and its memory with it: nothing can land there any more."""
        for stream in list(self.unreaped):
            self.reaped(stream)

    def under_way(self) -> bool:
        return bool(self.parked or self.queue or self.unreaped or any(self.carried.values()))

    # -- streams --------------------------------------------------------------------------------------------

    def take(self, carrier: Carrier, idle: bool, writes: bool) -> list[Slice] | None:
        """Slices for one frame: all WRITE, or all of one other kind. Empty: nothing now; None: the stream shall end.

        ``idle``: nothing is in flight on the stream; without work it rests from now on, until it is woken or started.
        ``writes`` False: answers with payload are on their way to us, so a payload from us could block both sides for
        ever.
        """
        if carrier.ending:
            return None
        if idle and not self.queue:
            self.resting[carrier] = None
        if not self.queue or (self.queue[0].kind is Kind.WRITE and not writes):
            return []
        return self._frame(carrier)

    def _frame(self, carrier: Carrier) -> list[Slice]:
        taken: list[Slice] = []
        kind, size, count = self.queue[0].kind, 0, 0
        while self.queue and self.queue[0].kind is kind and len(taken) < FRAME_SLICES:
            piece = self.queue[0]
            count += piece.count
            if taken and (size + piece.length > FRAME_BYTES or count > MAX_PIECES):
                break
            self.queue.popleft()
            self.queued_bytes -= piece.length
            size += piece.length
            piece.job.status = Status.PENDING
            self._post(carrier, piece)
            taken.append(piece)
        return taken

    def _post(self, carrier: Carrier, piece: Slice) -> None:
        if piece.kind in WRITES:
            self.ledger.post(piece.job.request.grant)
        self.carried[carrier][piece] = None

    def give_back(self, carrier: Carrier, pieces: Sequence[Slice]) -> None:
        """Taken, but not one byte of them was sent."""
        for piece in reversed(pieces):
            del self.carried[carrier][piece]
            if piece.kind in WRITES:
                self.ledger.land(piece.job.request.grant)
            self.queue.appendleft(piece)
            self.queued_bytes += piece.length

    def landed(self, carrier: Carrier, pieces: Sequence[Slice], refused: Refusals) -> None:
        """The target answered for ``pieces``."""
        carried = self.carried[carrier]
        for index, piece in enumerate(pieces):
            del carried[piece]
            if piece.kind in WRITES:
                self.ledger.land(piece.job.request.grant)
            errors = refused.get(index)
            if errors and piece.kind is Kind.PULL and self._push and self._unmapped(piece, errors):
                self._push_instead(piece)
            else:
                piece.settle(refused=errors)

    def _unmapped(self, piece: Slice, errors: dict[int, MooncakeError]) -> bool:
        return piece.job.error is None and any(isinstance(error, NoTransport) for error in errors.values())

    def _push_instead(self, piece: Slice) -> None:
        """The target cannot map our memory: the second choice of the policy."""
        self.pullable = False
        SECOND_CHOICE.labels("tcp").inc()
        piece.kind, piece.source, piece.job.transport = Kind.WRITE, None, "tcp"
        self.submit([piece])

    def join(self, carrier: Carrier) -> None:
        self.carried[carrier] = {}

    def lost(self, carrier: Carrier, error: MooncakeError) -> None:
        """The stream ended and its thread has let go of all memory."""
        self.resting.pop(carrier, None)
        pieces = self.carried.pop(carrier, {})
        writes = [piece for piece in pieces if piece.kind in WRITES]
        if writes:
            lost = self.unreaped[carrier.id] = Lost([piece.job.request.grant for piece in writes], writes)
            lost.settle(lambda piece: piece.job.error is not None or self.refuses(piece.job), _fenced())
        self._again([piece for piece in pieces if piece.kind not in WRITES], error)
        self.rouse()  # for what this one was woken for

    def reaped(self, stream: int) -> None:
        """The target says that nothing of that stream can land any more: its slices may go again."""
        lost = self.unreaped.pop(stream, None)
        if lost is not None:
            for grant in lost.grants:
                self.ledger.land(grant)
            self._again(lost.pieces, PeerGone("the connection was lost"))

    # -- inside ---------------------------------------------------------------------------------------------

    def _drop(self, which: Callable[[Slice], bool], error: MooncakeError) -> None:
        over = [piece for piece in self.queue if which(piece)]
        if over:
            gone = set(over)
            self.queue = deque(piece for piece in self.queue if piece not in gone)
            self.queued_bytes = sum(piece.length for piece in self.queue)
        for piece in over:
            piece.settle(error)

    def _again(self, pieces: Sequence[Slice], error: MooncakeError) -> None:
        for piece in pieces:
            piece.attempts += 1
            if piece.job.error:
                piece.settle(piece.job.error)
            elif self.refuses(piece.job):
                piece.settle(_fenced())
            elif piece.attempts >= ATTEMPTS:
                piece.settle(PeerGone(f"failed on {ATTEMPTS} paths, at last: {error.message}"))
            else:
                RETRIED.inc()
                self.submit([piece])


def _fenced() -> Fenced:
    return Fenced("the landing was fenced")
