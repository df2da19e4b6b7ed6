"""Paths against a world of cables: NICs fail and return, peers restart, slices are lost and sent again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.store.transfer.topology.health import FIRST, LONGEST, Fault
from services.store.transfer.topology.matrix import Matrix, Tiers
from services.store.transfer.topology.paths import Nic, Nics, Path, Paths
from tests.examples import examples

HERE = ("a", "b", "c")
THERE = ("x", "y")
PEERS = (0, 1)


@dataclass
class Flying:
    """One slice on its way. ``over`` the paths of one incarnation of a peer."""

    over: Paths
    path: Path
    length: int
    tried: list[Path] = field(default_factory=list)


def matrices(names: tuple[str, ...]) -> st.SearchStrategy[Matrix]:
    def split(order: list[str], at: int, out: int) -> Matrix:
        return Matrix({"cpu:0": Tiers(tuple(order[out:at]), tuple(order[max(at, out) :]))})

    return st.builds(split, st.permutations(names), st.integers(0, len(names)), st.integers(0, 1))


class Cables(RuleBasedStateMachine):
    """The model: which NICs are up, which slices fly. A slice arrives when both its ends are up."""

    @initialize(here=matrices(HERE), there=st.lists(matrices(THERE), min_size=2, max_size=2))
    def begin(self, here: Matrix, there: list[Matrix]) -> None:
        self.now = 0.0
        self.here = Nics(here)
        self.matrices = there
        self.restarts = 0
        self.down: set[str] = set()  # "a", or "0:x" for a NIC of peer 0
        self.paths = {peer: self.paths_to(peer) for peer in PEERS}
        self.flying: list[Flying] = []
        self.failed_at: dict[Path, float] = {}  # when it last failed, until it works

    def paths_to(self, peer: int) -> Paths:
        return Paths(self.here, Nics(self.matrices[peer]), (peer, self.restarts))

    # -- slices ---------------------------------------------------------------------------------------------

    @rule(peer=st.sampled_from(PEERS), length=st.integers(1, 100))
    def submit(self, peer: int, length: int) -> None:
        self.send(self.paths[peer], length, [])

    @rule(peer=st.sampled_from(PEERS))
    def submit_many(self, peer: int) -> None:
        for length in range(10, 20):
            self.send(self.paths[peer], length, [])

    def send(self, over: Paths, length: int, tried: list[Path]) -> None:
        free = [path for path in self.every(over) if not path.resting(self.now)]
        due = [path for path in free if path.due(self.now) or path.local.rest.due(self.now)]
        queued = {nic: nic.queued for nic in (*self.here, *over.there)}
        path = over.choose("cpu:0", "cpu:0", self.now, tuple(tried))
        if path is None:
            assert not free
            ready = over.ready_at("cpu:0", "cpu:0")
            assert ready is not None
            assert self.now < ready <= self.now + LONGEST
            return
        assert path in free
        if path not in due and not due:
            self.check_choice(over, path, free, queued, tried)
        over.posted(path, length)
        self.flying.append(Flying(over, path, length, tried))

    def check_choice(
        self, over: Paths, path: Path, free: list[Path], queued: dict[object, int], tried: list[Path]
    ) -> None:
        """By the definition, over all pairs."""

        def order(other: Path) -> tuple[int, ...]:
            far = self.far(self.here, other.local.name) + self.far(over.there, other.remote.name)
            shared = sum((other.local is old.local) + (other.remote is old.remote) for old in tried)
            again = (tried.count(other), shared) if tried else ()
            return *again, far

        best = min(order(other) for other in free)
        assert order(path) == best
        equals = [other for other in free if order(other) == best]
        if not tried and best[0] != 1:
            least = min(queued[other.local] for other in equals)
            assert queued[path.local] == least
            assert queued[path.remote] == min(queued[o.remote] for o in equals if o.local is path.local)

    def far(self, nics: Nics, name: str) -> int:
        preferred, secondary = nics.matrix.at("cpu:0")
        return int(name in secondary and bool(preferred))

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """The oldest slices of one path come back, as their cables have it."""
        path = data.draw(st.sampled_from([flying.path for flying in self.flying]))
        mine = [flying for flying in self.flying if flying.path is path]
        self.flying = [flying for flying in self.flying if flying.path is not path]
        over = mine[0].over
        for flying in mine:
            over.settled(path, flying.length)
        if self.works(over, path):
            over.worked(path, sum(flying.length for flying in mine))
            self.failed_at.pop(path, None)
            return
        over.failed(path, Fault.LINK, self.now)
        self.failed_at[path] = self.now
        for flying in mine:
            if len(flying.tried) < 3 and over in self.paths.values():
                self.send(over, flying.length, [*flying.tried, path])

    def works(self, over: Paths, path: Path) -> bool:
        peer = next((peer for peer, paths in self.paths.items() if paths is over), None)
        return peer is not None and path.local.name not in self.down and f"{peer}:{path.remote.name}" not in self.down

    # -- the world ------------------------------------------------------------------------------------------

    @rule(nic=st.sampled_from([*HERE, *(f"{peer}:{name}" for peer in PEERS for name in THERE)]))
    def pull(self, nic: str) -> None:
        self.down.add(nic)

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def plug(self, data: st.DataObject) -> None:
        self.down.remove(data.draw(st.sampled_from(sorted(self.down))))

    @rule(name=st.sampled_from(HERE), up=st.booleans())
    def device_event(self, name: str, up: bool) -> None:
        """The device says so, rightly or not."""
        if name in self.here.by_name:
            (self.here.up(name) if up else self.here.down(name, self.now))

    @rule(seconds=st.sampled_from([0.01, FIRST / 2, FIRST, 1.0, LONGEST, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(peer=st.sampled_from(PEERS))
    def restart(self, peer: int) -> None:
        """Another incarnation: nothing that was known of the old one counts, its slices fail."""
        self.restarts += 1
        self.paths[peer] = self.paths_to(peer)

    # -- what always holds ----------------------------------------------------------------------------------

    def every(self, over: Paths) -> list[Path]:
        return [over.path(mine, yours) for mine in self.here.by_name for yours in over.there.by_name]

    @invariant()
    def queues_are_what_flies(self) -> None:
        queued = Counter[Nic]()
        for flying in self.flying:
            queued[flying.path.local] += flying.length
        assert all(nic.queued == queued[nic] for nic in self.here)
        still_open = Counter(flying.path for flying in self.flying)
        assert all(path.open == count for path, count in still_open.items())

    @invariant()
    def what_failed_rests_at_first_and_nothing_for_ever(self) -> None:
        for path, failed in self.failed_at.items():
            assert path.resting(self.now) or self.now >= failed + FIRST
            assert not path.resting(self.now + LONGEST)

    @invariant()
    def no_rest_without_a_trace(self) -> None:
        """Where nobody is known to be in trouble nobody rests: the quick choice may be made."""
        for nic in self.here:
            assert (nic.rest.until is not None) <= (nic in self.here.troubled)

    def teardown(self) -> None:
        """All cables are in again: within a few rests every preferred NIC of both ends carries."""
        if not hasattr(self, "paths"):
            return
        for flying in self.flying:
            flying.over.settled(flying.path, flying.length)
        for over in self.paths.values():
            used: set[str] = set()
            for _ in range(3 * len(HERE) * len(THERE)):
                self.now += LONGEST / 3
                path = over.choose("cpu:0", "cpu:0", self.now)
                if path is not None:
                    over.worked(path, 1)
                    used |= {path.local.name, path.remote.name}
            normal = {nic.name for side in (self.here, over.there) for nic in side.tiers("cpu:0")[0]}
            assert used >= normal


TestCables = pytest.mark.timeout(300)(Cables.TestCase)
TestCables.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
