"""What holds of every run, whatever the trace, the cluster and what befalls it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.scheduling import POLICIES
from shared.workload.trace import BLOCK, TraceRequest
from simulator.clock import Clock
from simulator.cluster import Cluster
from simulator.link import Flow, Nic
from simulator.request import Request
from simulator.runs import coupled_run, read, run
from simulator.settings import ClusterSettings, Failure, Hardware

SMALL = Hardware(dram=40 * BLOCK, hbm=4000 * BLOCK)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts of a tree: some share what they begin with."""
    ids: dict[tuple[int, ...], int] = {}
    arrival, requests = 0.0, []
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))
        words = draw(st.lists(st.integers(0, 1), min_size=1, max_size=30))
        chain = tuple(ids.setdefault(tuple(words[: n + 1]), len(ids)) for n in range(len(words)))
        tokens = len(chain) * BLOCK - draw(st.integers(0, BLOCK - 1))
        requests.append(TraceRequest(arrival, tokens, draw(st.integers(0, 40)), chain))
    return requests


settings = st.builds(
    ClusterSettings,
    hardware=st.sampled_from([SMALL, Hardware(dram=20 * BLOCK, ssd=30 * BLOCK, nic=1e9, hbm=100 * BLOCK)]),
    prefill=st.sampled_from([2, 4]),
    decode=st.integers(1, 3),
    group=st.sampled_from([1, 2]),
    conductors=st.integers(1, 3),
    policy=st.sampled_from(sorted(POLICIES)),
    decode_cache=st.booleans(),
    overtake=st.sampled_from([0.0, 4.0]),
    thrift=st.sampled_from([0.0, 10.0]),
    handover=st.sampled_from([0.0, 0.02]),
    index_delay=st.sampled_from([0.0, 0.005, 2.0]),
    failures=st.sampled_from(
        [(), (Failure("prefill-0", 1.0, 3.0),), (Failure("decode-0", 2.0, 4.0), Failure("prefill-1", 2.5, 1.0))]
    ),
)


def outcome(request: Request) -> tuple[Any, ...]:
    return (
        request.ended,
        request.first_token,
        request.finished,
        request.hit,
        request.tbt,
        request.prefill,
        request.decode,
    )


@given(traces(), settings)
def test_every_request_ends_once_and_nothing_is_left(trace: list[TraceRequest], chosen: ClusterSettings) -> None:
    cluster = Cluster(chosen)
    requests = cluster.run(trace)
    for request in requests:
        assert request.ended == "done"
        assert request.trace.arrival <= request.first_token <= request.finished
        assert request.made == request.output
        assert 0 <= request.fetched <= request.hit < request.trace.input_tokens
        assert request.tbt >= request.tbt_mean >= 0
    for node in cluster.nodes.values():
        assert not node.nic.flows and node.nic.backlog == 0
        assert len(node.pool.dram) <= max(node.pool.dram.capacity, 0)
        assert max(node.nic.sending_busy, node.nic.receiving_busy) <= cluster.clock.now + 1e-9
    assert sum(one.nic.sent for one in cluster.nodes.values()) == sum(
        one.nic.received for one in cluster.nodes.values()
    )
    for decode in cluster.decodes.values():
        assert not decode.landings and not len(decode.batch) and decode.batch.context == 0
        assert decode.load().room_blocks == chosen.hardware.hbm // BLOCK
    for conductor in cluster.conductors:
        assert not conductor.ledger.open_bookings
        assert all(counts == (0, 0) for counts in conductor.coming.values())


@given(traces(), settings)
def test_the_same_seed_gives_the_same_run(trace: list[TraceRequest], chosen: ClusterSettings) -> None:
    first, second = ([outcome(one) for one in Cluster(chosen).run(trace)] for _ in range(2))
    assert first == second


@given(traces(), st.booleans(), st.booleans(), st.sampled_from(["round_robin", "least_loaded"]))
def test_coupled_instances_serve_everything(trace: list[TraceRequest], cache: bool, chunked: bool, router: str) -> None:
    chosen = {"nodes": 2, "prefix_cache": cache, "chunked": chunked, "router": router, "hardware": {"hbm": 100 * BLOCK}}
    for request in coupled_run(chosen, trace):
        assert request.ended == "done"
        assert request.trace.arrival < request.first_token <= request.finished
        assert request.tbt >= request.tbt_mean >= 0
        assert cache or request.hit == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 5), st.integers(0, 10**10)), max_size=12)
)
def test_links_keep_to_their_rate(flows: list[tuple[int, int, int, int]]) -> None:
    clock, nics = Clock(), [Nic(1e9) for _ in range(3)]
    ended: list[int] = []

    def begin(number: int, source: int, target: int, at: int, size: int) -> None:
        releases = [(float(at), size // 2), (at + 1.0, size)]
        Flow(clock, nics[source], nics[target], releases, lambda: ended.append(number), lambda: None)

    for number, flow in enumerate(flows):
        clock.at(float(flow[2]), begin, number, *flow)
    clock.run()
    assert sorted(ended) == list(range(len(flows)))
    for at, nic in enumerate(nics):
        assert nic.sent == sum(size for source, _, _, size in flows if source == at)
        assert nic.received == sum(size for _, target, _, size in flows if target == at)
        assert max(nic.sent, nic.received) / nic.rate <= clock.now + 1e-9


def test_two_flows_share_a_link() -> None:
    clock, sender, ends = Clock(), Nic(1e9), dict[str, float]()

    def over(name: str) -> None:
        ends[name] = clock.now

    for name, size in (("long", 8 * 10**9), ("short", 10**9)):
        Flow(clock, sender, Nic(1e9), [(0.0, size)], partial(over, name), lambda: None)
    clock.run()
    assert ends["short"] < 3.0 and ends["long"] == pytest.approx(9.0)


def test_what_fits_no_cluster_is_refused() -> None:
    requests = run({"prefill": 1, "decode": 1, "hardware": {"hbm": BLOCK}}, [TraceRequest(0.0, 2000, 5, (0, 1, 2, 3))])
    assert [one.ended for one in requests] == ["does_not_fit"]


def test_objectives_refuse_what_would_be_late() -> None:
    burst = [TraceRequest(0.0, 64 * BLOCK, 2, tuple(range(64 * n, 64 * n + 64))) for n in range(20)]
    requests = run({"prefill": 1, "decode": 1, "ttft_slo": 20.0}, burst)
    done = [one for one in requests if one.ended == "done"]
    assert 0 < len(done) < 20 and all(one.ttft <= 20.0 for one in done)
    assert {one.ended for one in requests} == {"done", "ttft"}


def test_a_group_is_quicker_with_long_prompts_and_loses_nothing_with_short_ones() -> None:
    def ttft(group: int, blocks: int) -> float:
        trace = [TraceRequest(0.0, blocks * BLOCK, 1, tuple(range(blocks)))]
        return run({"prefill": 4, "decode": 1, "group": group}, trace)[0].ttft

    assert ttft(4, 256) < 0.35 * ttft(1, 256)
    assert ttft(4, 4) == pytest.approx(ttft(1, 4))


@pytest.mark.parametrize(
    ("given_settings", "said"),
    [({"prefill": 0}, "prefill"), ({"policy": "best"}, "global_cache"), ({"prefil": 3}, "prefil")],
)
def test_bad_settings_are_named(given_settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(given_settings, ClusterSettings)


def test_groups_must_divide_the_nodes() -> None:
    with pytest.raises(ValueError, match="groups of 3"):
        Cluster(ClusterSettings(prefill=4, group=3))


def test_the_past_is_refused() -> None:
    with pytest.raises(ValueError, match="before now"):
        Clock().at(-math.inf, lambda: None)


def chain_of(first: int, blocks: int) -> tuple[int, ...]:
    return tuple(range(first, first + blocks))


def test_who_is_queued_behind_its_prefix_finds_it_computed() -> None:
    """Several of them, as a burst of one conversation's turns is."""
    whole = 16
    trace = [TraceRequest(0.1 * n, (whole + n) * BLOCK + 1, 2, chain_of(0, whole + n + 1)) for n in range(4)]
    requests = run({"prefill": 1, "decode": 1}, trace)
    assert [request.hit for request in requests] == [0, *((whole + n) * BLOCK for n in range(1, 4))]


@pytest.mark.parametrize("group", [1, 2])
def test_blocks_of_a_chunk_are_there_before_the_prompt_is_done(group: int) -> None:
    cluster = Cluster(ClusterSettings(prefill=group, group=group, decode=1, chunk=4 * BLOCK))
    first, last = set[float](), set[float]()

    def look(cluster: Cluster) -> None:
        for block, seen in ((0, first), (3, first), (63, last)):
            if cluster.replicas(block):
                seen.add(cluster.clock.now)

    cluster.every(0.05, look)
    (request,) = cluster.run([TraceRequest(0.0, 64 * BLOCK, 200, chain_of(0, 64))])
    assert min(first) < 0.5 * request.first_token < request.first_token <= min(last)


def test_short_prompts_overtake_and_long_ones_hardly_wait_for_them() -> None:
    """Three prompts of 3.9 s, then two of 60 ms."""
    long = [TraceRequest(0.0, 56 * BLOCK, 1, tuple(range(100 * n, 100 * n + 56))) for n in range(1, 4)]
    short = [TraceRequest(at, BLOCK, 1, (n,)) for n, at in enumerate((1.0, 5.0))]

    def ttfts(**more: Any) -> list[float]:
        return [one.ttft for one in run({"prefill": 1, "decode": 1, "seed": 1, **more}, [*long, *short])]

    by_age, short_first = ttfts(), ttfts(overtake=4.0)
    assert by_age[3] > by_age[2] - 1.0 and by_age[4] > by_age[2] - 5.0
    assert short_first[3] < 0.5 * by_age[3] and short_first[4] < by_age[4] - 3.0
    assert max(short_first) < 1.05 * max(by_age)


def test_under_overload_thrift_serves_as_many_sooner_and_lets_in_long_ones_when_idle() -> None:
    mixed = [
        TraceRequest(0.2 * n, (64 if n % 3 else 4) * BLOCK, 1, tuple(range(100 * n, 100 * n + (64 if n % 3 else 4))))
        for n in range(60)
    ]

    def served(thrift: float) -> list[Request]:
        requests = run({"prefill": 1, "decode": 1, "ttft_slo": 10.0, "thrift": thrift}, mixed)
        return [one for one in requests if one.ended == "done"]

    plain, thrifty = served(0.0), served(10.0)
    assert len(thrifty) >= len(plain) and all(one.ttft <= 10.0 for one in thrifty)
    assert sum(one.ttft for one in thrifty) < 0.6 * sum(one.ttft for one in plain)
    assert thrifty[1].trace.input_tokens == 64 * BLOCK


def test_a_handover_is_paid_once_before_the_second_token() -> None:
    one = TraceRequest(0.0, 4 * BLOCK, 20, (0, 1, 2, 3))
    (plain,), (slow,) = (run({"handover": seconds, "control_delay": 0.0}, [one]) for seconds in (0.0, 0.5))
    assert slow.ttft == plain.ttft
    assert slow.finished - plain.finished == pytest.approx(0.5, abs=1e-6)
