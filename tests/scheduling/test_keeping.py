"""Hot prefixes: found, copied within the budget, dropped late and never below what is wanted. D4."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.conductor.scheduling.heat import HALF_LIFE, Heat, HotChain
from services.conductor.scheduling.keeping import Bring, Drop, Home, Keeping, KeepOptions
from shared.blocks import KEY
from tests.examples import examples

BYTES = 10
"""Of a block."""


def chain(name: int, blocks: int) -> bytes:
    return b"".join(name.to_bytes(8, "big") + at.to_bytes(8, "big") for at in range(blocks))


def warm(heat: Heat, keys: bytes, rate: float, seconds: float, start: float = 0.0) -> float:
    """Ask for ``keys`` at an even pace; returns the end."""
    for n in range(round(rate * seconds)):
        heat.asked(keys, start + n / rate)
    return start + seconds


def test_the_rate_of_an_even_pace_is_found_and_forgotten() -> None:
    heat, keys = Heat(), chain(1, 40)
    now = warm(heat, keys, 8.0, 6 * HALF_LIFE)
    (hot,) = heat.hot(2.0, now)
    assert hot.keys == keys and 7.0 < hot.rates[0] < 9.0 and 7.0 < hot.rates[-1] < 9.0
    assert heat.rate(keys[:KEY], now + 3 * HALF_LIFE) == pytest.approx(heat.rate(keys[:KEY], now) / 8)
    heat.tidy(now + 20 * HALF_LIFE)
    assert not len(heat) and not heat.hot(0.0, now)


def test_what_is_shared_is_told_from_what_follows_it() -> None:
    heat, shared = Heat(), chain(1, 20)
    for n in range(200):
        heat.asked(shared + chain(100 + n, 10), n / 10)
    (hot,) = heat.hot(2.0, 20.0)
    assert hot.keys == shared


def test_prompts_that_nobody_repeats_leave_little() -> None:
    heat = Heat(most=100)
    for n in range(300):
        heat.asked(chain(n, 50), n / 300)
    assert len(heat) <= 4 * 300
    heat.tidy(1.0)
    assert len(heat) <= 100


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.floats(0, 5)), max_size=60), st.floats(0.01, 2.0))
def test_hot_chains_begin_at_the_first_block_and_never_grow_hotter(
    script: list[tuple[int, int, float]], least: float
) -> None:
    heat, now = Heat(most=40), 0.0
    for name, blocks, passed in script:
        now += passed
        heat.asked(chain(0, 3) + chain(name, blocks), now)
        if passed > 4:
            heat.tidy(now)
    for hot in heat.hot(least, now):
        assert hot.keys[:KEY] == chain(0, 1) and len(hot.keys) == KEY * len(hot.rates)
        assert all(a >= b >= least for a, b in zip(hot.rates, hot.rates[1:], strict=False))


class Nodes:
    """Four nodes that do what they are told, and refuse to go below the copies that must be left."""

    def __init__(self, budget: float = 1e9, cool: float = 5.0) -> None:
        self.keeping = Keeping(KeepOptions(rate=1.0, most=8, bytes_per_s=budget, cool=cool))
        self.homes = [Home(f"p{i}", f"a{i}") for i in range(4)]
        self.blocks: dict[str, set[bytes]] = {home.agent: set() for home in self.homes}
        self.rates: dict[bytes, float] = {}
        self.now = 0.0

    def have(self, agent: str, keys: bytes) -> None:
        self.blocks[agent].update(split(keys))

    def held(self, keys: bytes) -> Mapping[str, int]:
        return {agent: n for agent, blocks in self.blocks.items() if (n := prefix(blocks, keys))}

    def copies(self, key: bytes) -> int:
        return sum(key in blocks for blocks in self.blocks.values())

    def set_rate(self, keys: bytes, rate: float) -> None:
        self.rates |= dict.fromkeys(split(keys), rate)

    def hot(self) -> list[HotChain]:
        """As :class:`Heat` would say."""
        firsts = [key for key in self.rates if key[8:] == bytes(8) and self.rates[key] >= self.keeping.least]
        return [HotChain(keys, tuple(self.rates[k] for k in split(keys))) for keys in map(self.whole, firsts)]

    def whole(self, first: bytes) -> bytes:
        return b"".join(key for key in self.rates if key[:8] == first[:8])

    def plan(self, passed: float = 1.0) -> list[Bring | Drop]:
        self.now += passed
        return self.keeping.plan(
            self.hot(), self.homes, self.held, lambda key: self.rates.get(key, 0.0), BYTES, self.now
        )

    def carry_out(self, orders: list[Bring | Drop]) -> None:
        for order in orders:
            agent = "a" + order.instance[1:]
            if isinstance(order, Bring):
                assert order.sources and all(set(split(order.keys)) <= self.blocks[s] for s in order.sources[:1])
                self.have(agent, order.keys)
            else:
                for key in split(order.keys):
                    if self.copies(key) > order.keep:
                        self.blocks[agent].discard(key)


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY] for at in range(0, len(keys), KEY)]


def prefix(blocks: set[bytes], keys: bytes) -> int:
    return next((n for n, key in enumerate(split(keys)) if key not in blocks), len(keys) // KEY)


def test_a_prefix_gets_a_copy_for_each_share_of_its_rate_and_loses_them_late() -> None:
    nodes, keys = Nodes(), chain(1, 5)
    nodes.have("a2", keys)
    nodes.set_rate(keys, 2.5)
    nodes.carry_out(nodes.plan())
    assert [nodes.copies(key) for key in split(keys)] == [3] * 5
    nodes.set_rate(keys, 1.8)  # a bit less: nothing happens
    for _ in range(30):
        assert not nodes.plan()
    nodes.set_rate(keys, 0.1)
    for _ in range(5):
        assert not nodes.plan()  # not at once
    nodes.carry_out(nodes.plan())
    assert [nodes.copies(key) for key in split(keys)] == [1] * 5 and not nodes.plan() and not nodes.keeping.chains


def test_bytes_are_bounded_and_the_front_of_the_hottest_comes_first() -> None:
    nodes, hot, cool = Nodes(budget=3 * BYTES), chain(1, 5), chain(2, 5)
    for keys, rate in ((cool, 2.0), (hot, 4.0)):
        nodes.have("a0", keys)
        nodes.set_rate(keys, rate)
    orders = nodes.plan()
    assert [(order.instance, order.keys) for order in orders] == [("p1", hot[: 3 * KEY])]
    for _ in range(10):
        nodes.carry_out(orders)
        orders = nodes.plan()
    assert [nodes.copies(key) for key in split(hot + cool)] == [4] * 5 + [2] * 5


def test_a_block_larger_than_the_budget_comes_in_time() -> None:
    nodes, keys = Nodes(budget=BYTES / 4), chain(1, 1)
    nodes.have("a0", keys)
    nodes.set_rate(keys, 2.0)
    for _ in range(4):
        nodes.carry_out(nodes.plan())
    assert nodes.copies(keys) == 2


def test_the_shared_front_of_a_chain_has_more_copies_than_its_end() -> None:
    nodes, keys = Nodes(), chain(1, 6)
    nodes.have("a1", keys)
    nodes.set_rate(keys, 2.0)
    nodes.set_rate(keys[: 2 * KEY], 4.0)
    nodes.carry_out(nodes.plan())
    assert [nodes.copies(key) for key in split(keys)] == [4, 4, 2, 2, 2, 2]


class Kept(RuleBasedStateMachine):
    """Rates rise and fall, nodes lose and gain blocks on their own: never is the last copy dropped, nor more brought
    than the budget allows; and what is wanted is there in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = 4 * BYTES
        self.nodes = Nodes(self.budget, cool=3.0)
        self.chains = [chain(name, 4) for name in range(3)]
        for at, keys in enumerate(self.chains):
            self.nodes.have(f"a{at}", keys)
            self.nodes.set_rate(keys, 0.0)

    @rule(at=st.integers(0, 2), rate=st.sampled_from([0.0, 0.4, 1.0, 1.3, 2.0, 3.7, 9.0]), shared=st.integers(0, 4))
    def rate(self, at: int, rate: float, shared: int) -> None:
        self.nodes.set_rate(self.chains[at], rate)
        self.nodes.set_rate(self.chains[at][: shared * KEY], rate + 1.0)

    @rule(at=st.integers(0, 2), agent=st.integers(0, 3), blocks=st.integers(1, 4))
    def computed(self, at: int, agent: int, blocks: int) -> None:
        self.nodes.have(f"a{agent}", self.chains[at][: blocks * KEY])

    @precondition(lambda self: any(len(self.nodes.blocks[f"a{i}"]) > 4 for i in range(4)))
    @rule(agent=st.integers(0, 3), seed=st.integers(0, 9))
    def evicted(self, agent: int, seed: int) -> None:
        for key in list(self.nodes.blocks[f"a{agent}"]):
            if self.nodes.copies(key) > 1 and random.Random(seed).random() < 0.3:
                self.nodes.blocks[f"a{agent}"].discard(key)

    @rule(passed=st.sampled_from([0.2, 1.0, 3.5]))
    def keep(self, passed: float) -> None:
        orders = self.nodes.plan(passed)
        brought = sum(len(order.keys) // KEY for order in orders if isinstance(order, Bring))
        assert brought * BYTES <= self.budget
        self.nodes.carry_out(orders)

    @invariant()
    def every_block_is_somewhere(self) -> None:
        assert all(self.nodes.copies(key) for keys in self.chains for key in split(keys))

    def teardown(self) -> None:
        for _ in range(15):
            self.nodes.carry_out(self.nodes.plan())
        for keys in self.chains:
            whole = max(self.nodes.held(keys).values(), default=0)
            for key in split(keys)[:whole]:
                if self.nodes.rates[key] >= 1.0:
                    assert self.nodes.copies(key) >= min(self.nodes.keeping.copies(self.nodes.rates[key]), 4)


TestKept = Kept.TestCase
TestKept.settings = settings(max_examples=examples(12), stateful_step_count=20, deadline=None)
