"""Each policy against a direct transcription of what it is meant to do."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.conductor.scheduling import (
    POLICIES,
    Ask,
    Decision,
    PolicyOptions,
    Rejection,
    Scheduler,
    policy,
)
from services.conductor.scheduling.pricing import fetch as fetched
from services.conductor.scheduling.views import PrefillView, SourceView
from tests.examples import examples
from tests.scheduling.cluster import Views, prefill_view, source_view

BLOCK, BYTES = 32, 1000


def situation(seed: int) -> tuple[Ask, PrefillView, SourceView, float]:
    """Up to six instances, sources among their agents and others', any models and queues."""
    rng = np.random.default_rng(seed)
    n, s, blocks = int(rng.integers(1, 7)), int(rng.integers(0, 5)), int(rng.integers(1, 41))
    tokens = blocks * BLOCK + int(rng.integers(0, BLOCK))
    here = rng.integers(0, blocks + 1, n) * rng.integers(0, 2, n)
    own = np.maximum(here, rng.integers(0, blocks + 1, n) * rng.integers(0, 2, n))
    open = rng.random(n) < 0.7
    open[rng.integers(0, n)] = True
    view = PrefillView(
        ids=[f"p{i}" for i in range(n)],
        agents=[f"a{i}" for i in range(n)],
        queue=rng.uniform(0, 5, n) * rng.integers(0, 2, n),
        base=rng.uniform(0, 0.1, n),
        linear=rng.uniform(1e-5, 1e-2, n),
        square=rng.uniform(0, 1e-6, n),
        here=here.astype(float),
        own=own.astype(float),
        ready=np.where(own > here, rng.uniform(0, 5, n), 0.0),
        below=here * rng.integers(0, 3, n) // 2,
        disk=10 ** rng.uniform(3, 9, n),
        inbound=rng.uniform(0, 5, n) * rng.integers(0, 2, n),
        open=open,
        turn=rng.integers(0, 9, n),
    )
    held = rng.integers(1, blocks + 1, s)
    sources = SourceView(
        agents=[f"s{i}" for i in range(s)],
        blocks=held.tolist(),
        dram=(held * rng.integers(0, 3, s) // 2).tolist(),
        disk=(10 ** rng.uniform(3, 9, s)).tolist(),
        rate=(10 ** rng.uniform(3, 9, s)).tolist(),
        backlog=(rng.uniform(0, 1e6, s) * rng.integers(0, 2, s)).tolist(),
        prefill=(rng.random(s) < 0.6).tolist(),
    )
    return Ask(tokens, blocks, BLOCK, BYTES, 16), view, sources, float(rng.uniform(1, 4))


SEEDS = st.integers(0, 2**32)
COLUMNS = ("blocks", "dram", "disk", "rate", "backlog", "prefill")


def seconds(view: PrefillView, i: int, ask: Ask, blocks: int) -> float:
    n, p = ask.tokens, min(blocks * BLOCK, ask.tokens - 1)
    return float(view.base[i] + view.linear[i] * (n - p) + view.square[i] * (n * n - p * p))


def algorithm_1(ask: Ask, view: PrefillView, sources: SourceView, threshold: float) -> tuple[int, float, int]:
    """The pseudo-code, step by step: (instance, TTFT, blocks to fetch)."""
    best_len, best_instance = 0, -1
    for s in range(len(sources.agents)):
        if sources.prefill[s] and sources.blocks[s] > best_len:
            best_len, best_instance = int(sources.blocks[s]), s
    ttft, p, fetch = math.inf, -1, 0
    for i in range(len(view.ids)):
        if not view.open[i]:
            continue
        own = int(view.own[i])
        ratio = best_len / own if own else (math.inf if best_len else 1.0)
        if ratio > threshold:
            prefix_len = best_len
            moved = (best_len - own) * BYTES
            t_transfer = (float(sources.backlog[best_instance]) + moved) / float(sources.rate[best_instance])
        else:
            prefix_len, t_transfer = own, 0.0
        total = t_transfer + float(view.queue[i]) + seconds(view, i, ask, prefix_len)
        if total < ttft:
            ttft, p, fetch = total, i, best_len if ratio > threshold else 0
    return p, ttft, fetch


@given(SEEDS)
@settings(max_examples=examples(200))
def test_paper_is_algorithm_1(seed: int) -> None:
    ask, view, sources, threshold = situation(seed)
    chosen = policy("paper", PolicyOptions(threshold=threshold))
    prices = chosen.price(ask, view, sources)
    row = chosen.choose(ask, prices)
    p, ttft, fetch = algorithm_1(ask, view, sources, threshold)
    assert prices.price[row] == pytest.approx(ttft)
    assert row == p or prices.price[row] == pytest.approx(prices.price[p], rel=1e-12)
    if row == p:
        assert int(prices.fetch(row)[0]) == fetch


def both_branches(ask: Ask, view: PrefillView, sources: SourceView, threshold: float, i: int) -> tuple[float, int]:
    """(least price, blocks to fetch) of one instance."""
    own, here = int(view.own[i]), int(view.here[i])
    below, disk = int(view.below[i]), BYTES / float(view.disk[i])  # from its own SSD
    at_hand = min([below * disk, *(send_instead(view, sources, i, s, disk) for s in range(len(sources.agents)))])
    best = (max(float(view.queue[i]), float(view.ready[i]), at_hand) + seconds(view, i, ask, own), 0)
    for s in range(len(sources.agents)):
        length = int(sources.blocks[s])
        ratio = length / own if own else math.inf
        if ratio <= threshold or length <= here:
            continue
        sent = float(sources.backlog[s]) + (length - here) * BYTES
        transfer = sent / float(sources.rate[s]) + float(view.inbound[i])
        transfer += max(length - max(int(sources.dram[s]), here), 0) * BYTES / float(sources.disk[s])
        behind = float(sources.backlog[s]) / float(sources.rate[s]) + float(view.inbound[i])
        ready = min(max(transfer, below * disk), transfer + send_instead(view, sources, i, s, disk) - behind)
        price = max(float(view.queue[i]), ready) + seconds(view, i, ask, length)
        if price < best[0]:
            best = (price, length)
    return best


def send_instead(view: PrefillView, sources: SourceView, i: int, s: int, disk: float) -> float:
    """Seconds in which a source sends from its DRAM what an instance has on its SSD, which reads the rest."""
    here, below = int(view.here[i]), int(view.below[i])
    sent = min(int(sources.dram[s]), here) - (here - below)
    if sent <= 0:
        return math.inf
    behind = float(sources.backlog[s]) / float(sources.rate[s]) + float(view.inbound[i])
    return behind + sent * BYTES / float(sources.rate[s]) + (below - sent) * disk


def test_another_node_s_dram_makes_up_for_a_slow_ssd() -> None:
    """A prefix is on the SSD of p0 (10 blocks a second) and in the DRAM of p1, which is busy; the link moves 1000."""
    ask = Ask(64 * 32, 64, 32, BYTES, 100)
    view = prefill_view([0.0, 5.0], [64, 64], below=np.array([64, 0]), disk=np.array([10.0 * BYTES, 1.0]))
    chosen = policy("global_cache", PolicyOptions())
    slow = chosen.price(ask, view, source_view([64], rate=[8.0 * BYTES]))  # a1 sends more slowly still
    quick = chosen.price(ask, view, source_view([64], rate=[1000.0 * BYTES]))
    none = chosen.price(ask, view, source_view([64], rate=[1000.0 * BYTES], dram=[0]))
    assert 6.4 < slow.price[0] < 6.5 and 6.4 < none.price[0] < 6.5
    assert 0.06 < quick.price[0] < 0.2
    assert chosen.choose(ask, slow) == chosen.choose(ask, none) == 1 and chosen.choose(ask, quick) == 0


@given(SEEDS)
@settings(max_examples=examples(200))
def test_global_cache_prices_both_branches(seed: int) -> None:
    ask, view, sources, threshold = situation(seed)
    chosen = policy("global_cache", PolicyOptions(threshold=threshold, tie_ratio=0.0, tie_seconds=0.0))
    prices = chosen.price(ask, view, sources)
    for i in range(len(view.ids)):
        price, fetch = both_branches(ask, view, sources, threshold, i)
        assert prices.price[i] == (pytest.approx(price) if view.open[i] else math.inf)
        if view.open[i]:
            assert (int(prices.fetch(i)[1]) >= 0) == (int(prices.fetch(i)[0]) > 0)
            assert int(prices.fetch(i)[0]) in (0, fetch) or int(prices.fetch(i)[0]) in sources.blocks
    row = chosen.choose(ask, prices)
    assert view.open[row] and prices.price[row] == prices.price.min()


@given(SEEDS, st.booleans())
def test_a_source_that_is_not_priced_is_cheaper_for_nobody(seed: int, on_disk: bool) -> None:
    """Links alike, as they mostly are: then few sources are worth a look."""
    ask, view, sources, threshold = situation(seed)
    if not len(sources.agents):
        return
    sources.rate, sources.disk = [*sources.rate[:1]] * len(sources.rate), [*sources.disk[:1]] * len(sources.disk)
    if not on_disk:
        sources.dram, view.below, view.on_disk = sources.blocks, 0 * view.below, False
    price, _, _ = fetched(ask, view, sources, threshold)
    for row in range(len(sources.agents)):
        alone = SourceView(sources.agents[row : row + 1], *(getattr(sources, name)[row : row + 1] for name in COLUMNS))
        least, _, _ = fetched(ask, view, alone, threshold)
        assert (price <= least * (1 + 1e-12)).all()


@given(SEEDS, st.booleans())
def test_what_is_left_out_where_nothing_is_promised_changes_no_price(seed: int, strict: bool) -> None:
    ask, view, sources, threshold = situation(seed)
    view.below, view.on_disk, view.ready, view.own = 0 * view.below, False, 0 * view.ready, view.here.copy()
    options = PolicyOptions(threshold=threshold if strict else 1.0)
    whole = policy("global_cache", options).price(ask, view, sources)
    view.own, view.moving = view.here, bool(view.inbound.any())
    quick = policy("global_cache", options).price(ask, view, sources)
    assert (quick.price == whole.price).all() and (quick.work == whole.work).all()
    assert all(quick.fetch(row) == whole.fetch(row) for row in range(len(view.ids)))


@given(SEEDS, st.sampled_from(sorted(POLICIES)))
@settings(max_examples=examples(100))
def test_every_policy_chooses_an_open_instance(seed: int, name: str) -> None:
    ask, view, sources, threshold = situation(seed)
    chosen = policy(name, PolicyOptions(threshold=threshold, rng=random.Random(1)))
    prices = chosen.price(ask, view, sources)
    assert view.open[chosen.choose(ask, prices)]
    listed = prices.candidates(3)
    assert listed and [c.price for c in listed] == sorted(c.price for c in listed)


def test_least_loaded_goes_to_the_shortest_queue_and_fetches_when_that_is_cheaper(views: Views) -> None:
    chosen = policy("least_loaded")
    view, ask = views.prefill([2.0, 0.5, 1.0], [10, 0, 0]), views.ask(10 * BLOCK + 1)
    prices = chosen.price(ask, view, views.source([10]))
    assert chosen.choose(ask, prices) == 1 and prices.fetch(1)[0] == 10
    slow = chosen.price(ask, view, views.source([10], rate=[100.0]))
    assert chosen.choose(ask, slow) == 1 and slow.fetch(1)[0] == 0


def test_local_cache_never_fetches(views: Views) -> None:
    chosen = policy("local_cache")
    ask = views.ask(100 * BLOCK)
    prices = chosen.price(ask, views.prefill([0.0, 0.0], [0, 50]), views.source([100]))
    assert chosen.choose(ask, prices) == 1 and not any(prices.fetch(row)[0] for row in range(2))


def test_ties_go_by_queue_then_by_turn(views: Views) -> None:
    chosen = policy("global_cache")
    ask = views.ask(1000)
    equal = chosen.price(ask, views.prefill([0.0, 0.0, 0.0], [0, 0, 0], turn=np.array([7, 3, 5])), views.source([]))
    assert chosen.choose(ask, equal) == 1
    by_queue = views.prefill([0.010, 0.0, 0.005], [0, 0, 0], turn=np.array([0, 9, 1]))  # prices within the tolerance
    assert chosen.choose(ask, chosen.price(ask, by_queue, views.source([]))) == 1


def test_the_threshold_guards_against_small_copies(views: Views) -> None:
    ask = views.ask(40 * BLOCK)
    view = views.prefill([0.0], [20])
    for threshold, fetch in ((1.9, 40), (2.0, 0)):
        prices = policy("global_cache", PolicyOptions(threshold=threshold)).price(ask, view, views.source([40]))
        assert prices.fetch(0)[0] == fetch


def test_a_fetch_overlaps_the_queue(views: Views) -> None:
    ask = views.ask(10 * BLOCK + 1)
    source = views.source([10], rate=[10_000.0])  # 1 s for ten blocks
    prices = policy("global_cache").price(ask, views.prefill([1.0], [0]), source)
    assert prices.fetch(0)[0] == 10 and prices.price[0] == pytest.approx(1.0 + 0.01 + 0.001)
    paper = policy("paper").price(ask, views.prefill([1.0], [0]), source)
    assert paper.price[0] == pytest.approx(2.0 + 0.01 + 0.001)


def test_a_fully_cached_prompt_computes_its_last_token(views: Views) -> None:
    prices = policy("global_cache").price(views.ask(4 * BLOCK), views.prefill([0.0], [4]), views.source([]))
    assert prices.price[0] == pytest.approx(0.01 + 0.001)


def test_a_decode_node_is_a_source_but_not_for_the_paper(views: Views) -> None:
    ask = views.ask(40 * BLOCK)
    source = views.source([40], prefill=[False], agents=["decode-agent"])
    assert policy("global_cache").price(ask, views.prefill([0.0], [0]), source).fetch(0)[0] == 40
    assert policy("paper").price(ask, views.prefill([0.0], [0]), source).fetch(0)[0] == 0


# -- decode choice and admission ---------------------------------------------------------------------------------


def scheduler(name: str = "global_cache") -> Scheduler:
    return Scheduler(policy(name))


def test_decode_is_chosen_for_the_time_when_prefill_ends(views: Views) -> None:
    """d0 is the emptier one now; but two of d1's three leave before prefill ends, and two more come to d0."""
    view = views.all([5.0], [0], [], [0, 0])
    live = {
        "live_row": np.array([0, 0, 1, 1, 1]),
        "live_joins": np.array([1.0, 2.0, 0.0, 0.0, 0.0]),
        "live_leaves": np.array([99.0, 99.0, 3.0, 4.0, 99.0]),
        "live_tokens": np.zeros(5),
        "assigned": np.array([2, 3]),
    }
    view = type(view)(view.prefill, views.decode([0, 0], per_sequence=np.full(2, 0.1), **live), view.sources)
    decided = scheduler().decide(views.ask(1000), view, None)
    assert isinstance(decided, Decision) and decided.decode == "d1"
    assert decided.tbt == pytest.approx(0.02 + 0.1 * 2)


def test_only_those_with_room_are_asked(views: Views) -> None:
    ask = views.ask(1000, expected_output=100)
    need = ask.total_blocks
    view = views.all([0.0], [0], [], [0, 9])

    def decide(room: list[int], total: list[int]) -> Decision | Rejection:
        decode = views.decode([0, 9], room=np.array(room), total=np.array(total))
        return scheduler().decide(ask, type(view)(view.prefill, decode, view.sources), None)

    fits = decide([need - 1, need], [1000, 1000])
    assert isinstance(fits, Decision) and fits.decode == "d1"
    full = decide([0, 0], [1000, 1000])
    assert isinstance(full, Rejection) and full.reason == "no_room" and full.shortage and full.shortage.late > 0
    never = decide([0, 0], [need - 1, ask.least_blocks - 1])
    assert isinstance(never, Rejection) and never.reason == "no_room"  # the first would do, for a shorter answer
    never = decide([0, 0], [ask.least_blocks - 1] * 2)
    assert isinstance(never, Rejection) and never.reason == "does_not_fit"


def test_more_than_an_empty_instance_promises_gets_all_of_it(views: Views) -> None:
    ask, view = views.ask(1000, expected_output=10_000), views.all([0.0], [0], [], [0])
    for room, good in ((95, True), (94, False)):
        decode = views.decode([0], room=np.array([room]), most=np.array([95]), total=np.array([100]))
        decided = scheduler().decide(ask, type(view)(view.prefill, decode, view.sources), None)
        assert isinstance(decided, Decision) == good


def test_nobody_to_ask(views: Views) -> None:
    view = views.all([0.0], [0], [], [0])
    no_prefill = type(view)(views.prefill([0.0], [0], open=np.array([False])), view.decode, view.sources)
    no_decode = type(view)(view.prefill, views.decode([0], open=np.array([False])), view.sources)
    for broken, reason in ((no_prefill, "no_prefill"), (no_decode, "no_decode")):
        rejection = scheduler().decide(views.ask(10), broken, None)
        assert isinstance(rejection, Rejection) and rejection.reason == reason


def test_the_planned_source_goes_first(views: Views) -> None:
    view = views.all([0.0], [0], [30, 40, 40, 20], [0])
    decided = scheduler().decide(views.ask(40 * BLOCK), view, None)
    assert isinstance(decided, Decision) and decided.fetch_blocks == 40
    assert decided.sources == (("a1", 40), ("a0", 30), ("a2", 40))
    assert decided.candidates()[0].fetch_blocks == 40
