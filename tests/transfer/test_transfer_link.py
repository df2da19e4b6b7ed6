"""The link's bookkeeping, driven at random: every slice is in one place, every job ends once, nothing lands late."""

from __future__ import annotations

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.store.transfer.base import Op, Request, Status
from services.store.transfer.batches import BatchTable, Job, Slice
from services.store.transfer.link import WRITES, Link, Refusals
from services.store.transfer.wire import Kind, SegmentRef
from shared.errors import DeadlineExceeded, OutOfRange, PeerGone
from shared.messages import Ref
from tests.examples import examples

PEER = Ref("p", 1)
KINDS = [Kind.READ, Kind.WRITE, Kind.PULL, Kind.VERIFY]


class FakeStream:
    def __init__(self, number: int) -> None:
        self.id = number
        self.ending = False
        self.over = False
        self.woken = 0
        self.generous = True
        self.lent = False
        self.started: list[list[Slice]] = []

    def destroy(self) -> None:
        self.ending = True
        self.over = True

    def wake(self) -> None:
        self.woken += 1

    def start(self, pieces: list[Slice]) -> bool:
        if self.over:
            self.ending = True
            return False
        self.started.append(pieces)
        return True

    def lend(self) -> bool:
        self.lent = self.generous
        return self.lent

    def carry(self, pieces: list[Slice]) -> bool:
        raise AssertionError("the test does that")


class LinkMachine(RuleBasedStateMachine):
    streams = Bundle("streams")
    frames = Bundle("frames")

    def __init__(self) -> None:
        super().__init__()
        self.link = Link(PEER, threading.Lock(), push=True)
        self.batch = BatchTable().allocate(1 << 20, lambda job: self.ended.append(job))
        self.ended: list[Job] = []
        self.jobs: list[Job] = []
        self.live: list[FakeStream] = []
        self.expired: set[Job] = set()
        self.refused: set[int] = set()
        self.count = 0

    @rule(
        kind=st.sampled_from([Kind.READ, Kind.WRITE, Kind.PULL, Kind.VERIFY]),
        pieces=st.integers(1, 3),
        grant=st.integers(0, 3),
    )
    def submit(self, kind: Kind, pieces: int, grant: int) -> None:
        op = Op.WRITE if kind in WRITES else Op.READ
        job = self.batch.add(Request(op, "l", 0, PEER, "s", 0, pieces, grant), None)
        self.jobs.append(job)
        with self.link.work:
            if self.link.refuses(job):
                job.finish(PeerGone("refused at once"))
                return
            job.open = pieces
            self.link.submit([Slice(job, kind, i, 1, SegmentRef("s")) for i in range(pieces)])

    @rule(target=streams)
    def connect(self) -> FakeStream:
        self.count += 1
        stream = FakeStream(self.count)
        self.link.join(stream)
        self.live.append(stream)
        return stream

    @rule(stream=streams)
    def end_unseen(self, stream: FakeStream) -> None:
        """Its connection is over, and it has not noticed."""
        stream.over = True

    @rule(stream=streams)
    def rest(self, stream: FakeStream) -> None:
        if stream in self.live and not self.link.carried[stream] and stream not in self.link.resting:
            with self.link.work:
                taken = self.link.take(stream, True, True)
                if taken:
                    self.link.landed(stream, taken, {})
            assert (stream in self.link.resting) == (taken == [])

    @rule(target=frames, stream=streams)
    def started(self, stream: FakeStream) -> tuple[FakeStream, list[Slice]]:
        """What was sent in its place while it rested is in flight on it."""
        return stream, stream.started.pop() if stream.started else []

    @rule(
        target=frames, kind=st.sampled_from(KINDS), grant=st.integers(0, 3), generous=st.booleans(), goes=st.booleans()
    )
    def express(self, kind: Kind, grant: int, generous: bool, goes: bool) -> tuple[FakeStream, list[Slice]]:
        """A frame that is carried in a resting stream's place: it ends there, or is adopted by the stream."""
        for stream in self.live:
            stream.generous = generous
        with self.link.work:
            idle = not self.link.queue and not any(self.link.carried.values())
            job = Job(
                self.batch, 0, Request(Op.WRITE if kind in WRITES else Op.READ, "l", 0, PEER, "s", 0, 1, grant), None
            )
            lent = None if self.link.refuses(job) else self.link.lend()
            if lent is None:
                return FakeStream(0), []
            assert idle and generous and isinstance(lent, FakeStream) and lent not in self.link.resting
            lent.lent = False
            if not goes:
                self.link.resting[lent] = None
                return lent, []
            self.batch.jobs.append(job)
            self.batch.unfinished += 1
            self.jobs.append(job)
            piece = Slice(job, kind, 0, 1, SegmentRef("s"))
            self.link.adopt(lent, [piece])
            lent.wake()
        return lent, [piece]

    @rule(target=frames, stream=streams, writes=st.booleans())
    def take(self, stream: FakeStream, writes: bool) -> tuple[FakeStream, list[Slice]]:
        if stream not in self.live or stream in self.link.resting:
            return stream, []
        with self.link.work:
            taken = self.link.take(stream, False, writes)
        if stream.ending:
            assert taken is None
        for piece in taken or []:
            assert piece.kind is (taken or [piece])[0].kind
            assert writes or piece.kind is not Kind.WRITE
            assert piece.job not in self.expired  # rule: what was given up is not posted
            assert piece.kind not in WRITES or piece.job.request.grant not in self.refused  # rule: writer_refuses
        return stream, taken or []

    @rule(frame=consumes(frames), fails=st.booleans())
    def answered(self, frame: tuple[FakeStream, list[Slice]], fails: bool) -> None:
        stream, pieces = frame
        if stream in self.live and pieces:
            refused: Refusals = {0: {0: OutOfRange("no")}} if fails else {}
            with self.link.work:
                self.link.landed(stream, pieces, refused)

    @rule(frame=consumes(frames))
    def given_back(self, frame: tuple[FakeStream, list[Slice]]) -> None:
        stream, pieces = frame
        if stream in self.live and not stream.ending:
            before = list(self.link.queue)
            with self.link.work:
                self.link.give_back(stream, pieces)
            assert [p for p in self.link.queue if p in before] == before

    @rule(stream=streams)
    def lost(self, stream: FakeStream) -> None:
        if stream in self.live:
            self.live.remove(stream)
            with self.link.work:
                self.link.lost(stream, PeerGone("cut"))

    @rule()
    def reap(self) -> None:
        with self.link.work:
            for stream in list(self.link.unreaped):
                self.link.reaped(stream)

    @rule(grant=st.integers(0, 3))
    def refuse(self, grant: int) -> None:
        with self.link.work:
            self.link.refuse([grant])
        self.refused |= {grant} - {0}

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        if self.jobs:
            chosen = data.draw(st.sampled_from(self.jobs))
            with self.link.work:
                self.link.expire([chosen], DeadlineExceeded("late"))
            self.expired.add(chosen)

    @rule()
    def give_up(self) -> None:
        with self.link.work:
            self.link.fail(PeerGone("nobody there"))

    def places(self) -> list[Slice]:
        carried = [piece for pieces in self.link.carried.values() for piece in pieces]
        lost = [piece for entry in self.link.unreaped.values() for piece in entry.pieces]
        return [*self.link.queue, *carried, *lost]

    @invariant()
    def every_slice_is_in_one_place_and_jobs_end_once(self) -> None:
        places = self.places()
        assert len(places) == len(set(places))
        assert len(self.ended) == len(set(self.ended))
        for job in self.jobs:
            assert job.open == sum(piece.job is job for piece in places)
            assert (job in self.ended) == (job.open == 0) == (job.status in (Status.COMPLETED, Status.FAILED))
        assert self.link.queued_bytes == len(self.link.queue)

    @invariant()
    def work_waits_for_no_stream_that_rests(self) -> None:
        """But for what more than one frame holds, which those that were woken will come for."""
        woken = any(stream.woken or stream.ending for stream in self.live)
        assert not (self.link.queue and self.link.resting) or woken
        assert all(not self.link.carried[stream] for stream in self.link.resting)

    @invariant()
    def the_ledger_counts_what_may_still_land(self) -> None:
        carried = [p.job.request.grant for ps in self.link.carried.values() for p in ps if p.kind in WRITES]
        lost = [grant for entry in self.link.unreaped.values() for grant in entry.grants]
        assert self.link.ledger.outstanding() == set(carried) | set(lost)

    @invariant()
    def expired_jobs_fly_only_on_streams_being_destroyed(self) -> None:
        for stream, pieces in self.link.carried.items():
            assert stream.ending or not any(piece.job in self.expired for piece in pieces)

    def teardown(self) -> None:
        for stream in list(self.live):
            self.lost(stream)
        self.reap()
        self.give_up()
        assert not self.places() and not self.link.under_way()
        assert len(self.ended) == len(self.jobs) and self.batch.unfinished == 0


LinkMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestLink = LinkMachine.TestCase
