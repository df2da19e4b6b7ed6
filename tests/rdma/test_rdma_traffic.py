"""The traffic to one peer, against a model: every slice is in one place, ends once, and no grant is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.store.transfer.base import Op, Request, Status
from services.store.transfer.batches import Batch, Job, Slice
from services.store.transfer.ledger import Ledger
from services.store.transfer.rdma.cargo import Cargo
from services.store.transfer.rdma.nic import UNBOUNDED
from services.store.transfer.rdma.reach import Part, Place, Reach
from services.store.transfer.rdma.traffic import Lane, Traffic
from services.store.transfer.segments import Segment
from services.store.transfer.topology.health import Fault
from services.store.transfer.topology.matrix import Matrix, Tiers
from services.store.transfer.topology.paths import Nics, Paths
from services.store.transfer.wire import Kind, SegmentRef
from shared.errors import DeadlineExceeded, NotPermitted, PeerGone
from shared.messages import Ref
from tests.examples import examples

PEER = Ref("peer", 1)
HERE, THERE = ("h0", "h1"), ("t0", "t1")
REACH = Reach("pool", 1, 1 << 20, "cpu:0", [Part(0, 1 << 20, 1 << 30, dict.fromkeys(THERE, 1))])
LENGTH = 16 << 10
GRANTS = st.integers(0, 3)


def nics(names: Sequence[str]) -> Nics:
    return Nics(Matrix({"cpu:0": Tiers(tuple(names))}))


class TrafficMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = Ledger()
        self.traffic = self.make()
        self.local = Segment("pool", memoryview(bytearray(1 << 20)), "cpu:0")
        self.ended: list[Job] = []
        self.jobs: list[Job] = []
        self.arrivals = 0

    def make(self) -> Traffic:
        def arrived(cargo: Cargo) -> None:
            self.arrivals += 1
            cargo.piece.settle(cargo.job.error)

        paths = Paths(nics(HERE), nics(THERE), PEER)
        return Traffic(paths, self.ledger, lambda cargo: ("cpu:0", "cpu:0"), arrived)

    # -- steps ------------------------------------------------------------------------------------------------

    @rule(op=st.sampled_from(list(Op)), grant=GRANTS, slices=st.integers(1, 6))
    def submit(self, op: Op, grant: int, slices: int) -> None:
        batch = Batch(1, 1, self.ended.append)
        job = batch.add(Request(op, "pool", 0, PEER, "pool", 0, slices * LENGTH, grant), self.local)
        job.open = slices
        kind = Kind.READ if op is Op.READ else Kind.WRITE
        pieces = [Slice(job, kind, at * LENGTH, LENGTH, SegmentRef("pool", 1)) for at in range(slices)]
        place = Place(1 << 30, {})
        self.jobs.append(job)
        self.traffic.submit([Cargo(piece, REACH, place, place, LENGTH) for piece in pieces], self.now)

    def lanes(self) -> list[Lane]:
        return list(self.traffic.lanes.values())

    @precondition(lambda self: self.traffic.lanes)
    @rule(data=st.data(), most=st.integers(1, 8), window=st.sampled_from([1, LENGTH, 2 * LENGTH, UNBOUNDED]))
    def post(self, data: st.DataObject, most: int, window: int) -> None:
        lane = data.draw(st.sampled_from(self.lanes()))
        taken = self.traffic.take(lane, most, window)
        numbers = [number for number, _ in taken]
        assert numbers == sorted(numbers)
        if any(not cargo.write for _, cargo in taken):
            assert lane.reading <= max(window, LENGTH)

    @invariant()
    def reads_that_fly_are_counted(self) -> None:
        for lane in self.lanes():
            assert lane.reading == sum(cargo.length for _, cargo in lane.flying if not cargo.write)

    @precondition(lambda self: any(lane.flying for lane in self.traffic.lanes.values()))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.lanes() if lane.flying]))
        number = data.draw(st.sampled_from([number for number, _ in lane.flying]))
        count = sum(flying <= number for flying, _ in lane.flying)
        assert sum(self.traffic.completed(lane, number).values()) == count * LENGTH

    @precondition(lambda self: any(lane.flying for lane in self.traffic.lanes.values()))
    @rule(data=st.data())
    def refuse_one(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.lanes() if lane.flying]))
        number, cargo = data.draw(st.sampled_from(list(lane.flying)))
        before = cargo.job.error
        self.traffic.refused(lane, number, NotPermitted("wrong key"))
        assert before or isinstance(cargo.job.refused.get(0), NotPermitted)
        self.traffic.broken(lane, NotPermitted("wrong key"), Fault.PEER, self.now)

    @precondition(lambda self: self.traffic.lanes)
    @rule(data=st.data(), fault=st.sampled_from([Fault.LINK, Fault.LOCAL, None]))
    def break_lane(self, data: st.DataObject, fault: Fault | None) -> None:
        lane = data.draw(st.sampled_from(self.lanes()))
        self.traffic.broken(lane, PeerGone("cable"), fault, self.now)
        assert not len(lane)

    @precondition(lambda self: self.traffic.unreaped)
    @rule(data=st.data())
    def reap(self, data: st.DataObject) -> None:
        self.traffic.reaped(data.draw(st.sampled_from(list(self.traffic.unreaped))), self.now)

    @rule(grant=st.integers(1, 3))
    def fence(self, grant: int) -> None:
        self.traffic.refuse([grant])
        assert not any(grant == cargo.request.grant and cargo.write for cargo in self.idle())

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        """When its lanes are destroyed nothing of the job is left."""
        job = data.draw(st.sampled_from(self.jobs))
        for lane in self.traffic.expire([job], DeadlineExceeded("late")):
            self.traffic.broken(lane, DeadlineExceeded("late"), None, self.now)
        assert job in self.ended

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.traffic.retry(self.now)

    # -- what always holds --------------------------------------------------------------------------------------

    def idle(self) -> list[Cargo]:
        return [*self.traffic.waiting, *(cargo for lane in self.lanes() for cargo in lane.queue)]

    def flying(self) -> list[Cargo]:
        return [cargo for lane in self.lanes() for _, cargo in lane.flying]

    @invariant()
    def every_open_slice_is_in_one_place(self) -> None:
        lost = [cargo for lost in self.traffic.unreaped.values() for cargo in lost.cargos]
        places = [*self.idle(), *self.flying(), *lost]
        assert len(places) == len({id(cargo) for cargo in places}) == sum(job.open for job in self.jobs)

    @invariant()
    def jobs_end_once(self) -> None:
        assert len(self.ended) == len(set(self.ended))
        for job in self.jobs:
            assert (job.open == 0) == (job in self.ended) == (job.status in (Status.COMPLETED, Status.FAILED))

    @invariant()
    def grants_in_flight_are_known(self) -> None:
        flying = {cargo.request.grant for cargo in self.flying() if cargo.write}
        lost = {grant for lost in self.traffic.unreaped.values() for grant in lost.grants}
        assert self.ledger.outstanding() == flying | lost

    @invariant()
    def queued_bytes_are_those_on_lanes(self) -> None:
        on_lanes = sum(cargo.length for lane in self.lanes() for cargo in (*lane.queue, *(c for _, c in lane.flying)))
        assert sum(nic.queued for nic in self.traffic.paths.here) == on_lanes
        assert sum(nic.queued for nic in self.traffic.paths.there) == on_lanes

    def teardown(self) -> None:
        """Left alone with NICs that work, everything ends."""
        for _ in range(100):
            self.now += 20
            self.traffic.bury(self.now)
            self.traffic.retry(self.now)
            for lane in self.lanes():
                taken = self.traffic.take(lane, 1000)
                if taken:
                    self.traffic.completed(lane, taken[-1][0])
                elif lane.flying:
                    self.traffic.completed(lane, lane.flying[-1][0])
        assert len(self.ended) == len(self.jobs)
        assert not self.traffic.under_way() and not self.ledger.outstanding()


TestTraffic = TrafficMachine.TestCase
TestTraffic.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
