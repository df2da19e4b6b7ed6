"""Choice of paths: preferred before secondary, the least queued first, another one on a retry, rests and probes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.store.transfer.topology.health import FIRST, LONGEST, Fault
from services.store.transfer.topology.matrix import Matrix
from services.store.transfer.topology.paths import Nics, Path, Paths
from tests.examples import examples

MIB = 1 << 20


def nics(*preferred: str, secondary: tuple[str, ...] = ()) -> Nics:
    return Nics(Matrix.parse({"cpu:0": [list(preferred), list(secondary)]}))


def chosen(paths: Paths, now: float = 0.0, tried: tuple[Path, ...] = ()) -> Path:
    path = paths.choose("cpu:0", "cpu:0", now, tried)
    assert path is not None
    return path


def test_c11_preferred_before_secondary() -> None:
    paths = Paths(nics("a", secondary=("b",)), nics("x", "y", secondary=("z",)), "peer")
    for _ in range(8):
        path = chosen(paths)
        paths.posted(path, MIB)
        assert path.local.name == "a"
        assert path.remote.name in ("x", "y")
    assert [nic.queued // MIB for nic in paths.there] == [4, 4, 0]


def test_c11_empty_preferred_means_that_secondary_ones_serve_at_once() -> None:
    paths = Paths(nics(secondary=("a", "b")), nics("x"), "peer")
    assert {chosen(paths).local.name for _ in range(2)} == {"a", "b"}


def test_a_server_without_nics_has_no_path() -> None:
    for paths in (Paths(nics(), nics("x"), 1), Paths(nics("a"), nics(), 1)):
        assert paths.choose("cpu:0", "cpu:0", 0.0) is None
        assert paths.ready_at("cpu:0", "cpu:0") is None


def test_both_ends_are_chosen_by_where_their_buffers_lie() -> None:
    here = Nics(Matrix.parse({"cpu:0": [["a"], ["b"]], "cuda:0": [["b"], ["a"]]}))
    there = Nics(Matrix.parse({"cpu:0": [["x"], ["y"]], "cuda:0": [["y"], ["x"]]}))
    paths = Paths(here, there, "peer")
    assert repr(paths.choose("cuda:0", "cpu:0", 0.0)) == "Path(b -> x)"
    assert repr(paths.choose("cpu:0", "cuda:0", 0.0)) == "Path(a -> y)"


def test_the_least_queued_first_and_ties_by_turn() -> None:
    paths = Paths(nics("a", "b", "c"), nics("x"), "peer")
    assert [chosen(paths).local.name for _ in range(6)] == list("abcabc")
    paths.posted(paths.path("a", "x"), 3 * MIB)
    paths.posted(paths.path("b", "x"), 2 * MIB)
    assert [chosen(paths).local.name for _ in range(2)] == list("cc")
    paths.settled(paths.path("b", "x"), 2 * MIB)
    assert [chosen(paths).local.name for _ in range(2)] == list("bc")


def test_queues_of_local_nics_are_shared_by_all_peers_and_those_of_remote_ones_are_not() -> None:
    here = nics("a", "b")
    one, other = Paths(here, nics("x"), 1), Paths(here, nics("x"), 2)
    one.posted(one.path("a", "x"), MIB)
    assert chosen(other).local.name == "b"
    assert other.there.by_name["x"].queued == 0


def test_all_nics_share_a_load_of_unequal_slices() -> None:
    paths = Paths(nics("a", "b", "c", "d"), nics("w", "x", "y", "z"), "peer")
    for number in range(400):
        paths.posted(chosen(paths), (1 + number % 7) * MIB)
    for side in (paths.here, paths.there):
        queued = [nic.queued for nic in side]
        assert max(queued) - min(queued) <= 7 * MIB


def test_a_retry_differs_at_both_ends_then_at_one_and_goes_to_secondary_ones() -> None:
    paths = Paths(nics("a", secondary=("b",)), nics("x", "y"), "peer")
    tried = [chosen(paths)]
    assert repr(tried[0]) == "Path(a -> x)"
    for expected in ("Path(b -> y)", "Path(a -> y)", "Path(b -> x)"):
        paths.failed(tried[-1], Fault.PEER, 0.0)  # as if no NIC could be blamed
        tried.append(chosen(paths, tried=tuple(tried)))
        assert repr(tried[-1]) == expected
    assert chosen(paths, tried=tuple(tried)) in tried  # all were tried: once more


@settings(max_examples=examples(50))
@given(st.integers(2, 5), st.integers(1, 5), st.data())
def test_one_dead_nic_costs_a_slice_one_attempt(mine: int, yours: int, data: st.DataObject) -> None:
    split, other = data.draw(st.integers(0, mine)), data.draw(st.integers(0, yours))
    names, theirs = [f"l{n}" for n in range(mine)], [f"r{n}" for n in range(yours)]
    here = nics(*names[:split], secondary=tuple(names[split:]))
    paths = Paths(here, nics(*theirs[:other], secondary=tuple(theirs[other:])), "peer")
    dead = data.draw(st.sampled_from(names))
    tried: list[Path] = []
    while (path := chosen(paths, 0.0, tuple(tried))).local.name == dead:
        paths.failed(path, Fault.LINK, 0.0)
        tried.append(path)
    assert len(tried) <= 1


def test_a_path_that_failed_rests_and_is_probed_by_one_slice() -> None:
    paths = Paths(nics("a"), nics("x"), "peer")
    path = chosen(paths)
    paths.failed(path, Fault.LINK, 10.0)
    assert paths.choose("cpu:0", "cpu:0", 10.0 + FIRST / 2) is None
    assert paths.ready_at("cpu:0", "cpu:0") == 10.0 + FIRST
    assert chosen(paths, 10.0 + FIRST) is path  # the probe
    assert paths.choose("cpu:0", "cpu:0", 10.0 + FIRST) is None
    paths.worked(path, 1)
    assert chosen(paths, 10.0 + FIRST) is path


def test_rests_double_up_to_the_longest_and_are_forgiven() -> None:
    paths = Paths(nics("a"), nics("x"), "peer")
    now, pauses = 0.0, []
    path = paths.path("a", "x")
    for _ in range(8):
        assert chosen(paths, now) is path
        paths.failed(path, Fault.LINK, now)
        for _ in range(5):
            paths.failed(path, Fault.LINK, now)  # what else was in flight
        ready = paths.ready_at("cpu:0", "cpu:0")
        assert ready is not None
        pauses.append(round(ready - now, 3))
        now = ready
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, LONGEST, LONGEST]
    paths.worked(chosen(paths, now), 1)
    paths.failed(path, Fault.LINK, now + 100.0)
    assert paths.ready_at("cpu:0", "cpu:0") == now + 100.0 + FIRST


def test_a_probe_that_is_never_heard_of_is_followed_by_another() -> None:
    paths = Paths(nics("a"), nics("x"), "peer")
    paths.failed(chosen(paths), Fault.LINK, 0.0)
    assert chosen(paths, FIRST) is not None
    assert paths.choose("cpu:0", "cpu:0", FIRST) is None
    assert chosen(paths, 3 * FIRST) is not None


def test_a_local_fault_rests_the_nic_towards_everybody() -> None:
    here = nics("a", "b")
    one, other = Paths(here, nics("x", "y"), 1), Paths(here, nics("x"), 2)
    one.failed(one.path("a", "x"), Fault.LOCAL, 0.0)
    assert {chosen(paths).local.name for paths in (one, other) for _ in range(4)} == {"b"}


def test_a_link_fault_blames_the_path_and_the_end_that_fails_with_two() -> None:
    here, there = nics("a", "b"), nics("x", "y")
    paths = Paths(here, there, "peer")
    paths.failed(paths.path("a", "x"), Fault.LINK, 0.0)
    assert not any(nic.rest.resting(0.0) for nic in (*here, *there))
    paths.failed(paths.path("b", "x"), Fault.LINK, 0.0)
    assert [nic.name for nic in (*here, *there) if nic.rest.resting(0.0)] == ["x"]


def test_our_nic_is_blamed_when_it_fails_with_two_peers_but_not_for_one_dead_peer() -> None:
    here = nics("a", "b")
    dead, alive = Paths(here, nics("x", "y"), "dead"), Paths(here, nics("x"), "alive")
    for mine in "ab":
        for yours in "xy":
            dead.failed(dead.path(mine, yours), Fault.LINK, 0.0)
    assert dead.choose("cpu:0", "cpu:0", 0.0) is None
    assert {chosen(alive).local.name for _ in range(2)} == {"a", "b"}
    alive.failed(alive.path("a", "x"), Fault.LINK, 0.0)
    assert here.by_name["a"].rest.resting(0.0)
    assert not here.by_name["b"].rest.resting(0.0)


def test_a_refusal_of_the_peer_rests_nothing() -> None:
    paths = Paths(nics("a"), nics("x"), "peer")
    paths.failed(chosen(paths), Fault.PEER, 0.0)
    assert chosen(paths) is paths.path("a", "x")


def test_what_the_device_says_counts_at_once() -> None:
    paths = Paths(nics("a", "b"), nics("x"), "peer")
    paths.here.down("a", 0.0)
    assert {chosen(paths).local.name for _ in range(3)} == {"b"}
    paths.here.up("a")
    assert {chosen(paths).local.name for _ in range(3)} == {"a", "b"}


def test_a_nic_that_came_back_is_used_again() -> None:
    """A preferred one is pulled: the secondary one carries, and hands over when it is back."""
    paths = Paths(nics("a", secondary=("b",)), nics("x"), "peer")
    paths.failed(chosen(paths), Fault.LINK, 0.0)
    assert chosen(paths, 0.1).local.name == "b"
    probe = chosen(paths, FIRST)
    assert probe.local.name == "a"
    assert chosen(paths, FIRST).local.name == "b"  # until the probe is back
    paths.worked(probe, MIB)
    used = Counter(chosen(paths, FIRST).local.name for _ in range(4))
    assert used == {"a": 4}
    assert paths.here.by_name["a"].carried == MIB
