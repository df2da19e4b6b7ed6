"""Publisher, Redis (the twin) and mirrors after the checked model: whatever fails, in the end all are equal.

Moves: commits, evictions, tier changes; an answer lost, a flight never arriving or arriving twice; failover to a copy
taken earlier, flush, trim; the agent restarts, its last update arrives late; its registration expires and comes back;
the sweeper sees it dead and sweeps later; mirrors read late, in pieces, break half-way, and start anew.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.blocks import KEY
from shared.index import code, shard_of
from shared.index.digest import State, rotated
from shared.index.mirror import Mirror
from shared.index.prefix import PrefixIndex
from shared.index.publisher import Publisher
from shared.index.twin import ShardTwin
from tests.examples import examples

SHARDS = 3
AGENTS = 2
BRANCHES = 2


def key(parent: bytes, token: int) -> bytes:
    return hashlib.sha256(parent + bytes([token])).digest()[:KEY]


def chain(path: list[int]) -> list[bytes]:
    out, parent = [], b"root"
    for token in path:
        parent = key(parent, token)
        out.append(parent)
    return out


def universe(depth: int, parent: bytes = b"root") -> list[bytes]:
    keys = [key(parent, token) for token in range(BRANCHES)] if depth else []
    return [*keys, *(k for parent in keys for k in universe(depth - 1, parent))]


UNIVERSE = [[k for k in universe(6) if shard_of(k, SHARDS) == shard] for shard in range(SHARDS)]


def state_of(inventory: dict[bytes, int]) -> tuple[int, int]:
    xor = 0
    for k, tier in inventory.items():
        xor ^= rotated(int.from_bytes(k, "big"), tier)
    return len(inventory), xor


class Agent:
    """A publisher and its registration."""

    def __init__(self, number: int) -> None:
        self.incarnation = number * 1000 + 1
        self.start()

    def start(self) -> None:
        self.publisher = Publisher(code(self.incarnation), SHARDS)
        self.registered = True
        self.beat = 0

    @property
    def code(self) -> bytes:
        return self.publisher.code


class Breakdown(Exception):
    """A bug, or no memory."""


class Breaking:
    """Within it, the change of blocks that comes after ``after`` others breaks: ``late``, once it is made."""

    def __init__(self, after: int, late: bool) -> None:
        self._left, self._late = after, late
        self._patch = pytest.MonkeyPatch()
        self.done = False

    def __enter__(self) -> Breaking:
        for name in ("store", "store_loose", "remove", "connect"):
            self._patch.setattr(PrefixIndex, name, self._breaking(getattr(PrefixIndex, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()

    def _breaking(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0 and not self._late:
                raise Breakdown
            answer = change(*args)
            if self._left < 0:
                raise Breakdown
            return answer

        return changed


paths = st.lists(st.integers(0, BRANCHES - 1), min_size=1, max_size=6)
agents = st.integers(0, AGENTS - 1)
shards = st.integers(0, SHARDS - 1)


class Protocol(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.redis = [ShardTwin() for _ in range(SHARDS)]
        self.copies: list[list[ShardTwin]] = []
        self.agents = [Agent(n) for n in range(AGENTS)]
        self.late: list[tuple[int, bytes]] = []
        self.dead: list[bytes] = []
        self.mirrors = [Mirror(SHARDS), Mirror(SHARDS)]
        self.now = 0.0
        self.told_living: list[set[bytes]] = [set(), set()]
        self.resync(0)  # one follows from the start, one begins late

    def living(self) -> list[bytes]:
        return [agent.code for agent in self.agents if agent.registered]

    # -- the agent

    @rule(agent=agents, path=paths, start=st.integers(0, 5), tier=st.sampled_from([0, 0, 0, 1]), known=st.booleans())
    def commit(self, agent: int, path: list[int], start: int, tier: int, known: bool) -> None:
        keys = chain(path)
        start = min(start, len(keys) - 1)
        parent = (keys[start - 1] if start else b"") if known else None
        self.agents[agent].publisher.committed(parent, keys[start:], tier)

    @rule(agent=agents, path=paths, n=st.integers(1, 6))
    def evict(self, agent: int, path: list[int], n: int) -> None:
        self.agents[agent].publisher.evicted(chain(path)[-n:][::-1])

    @rule(agent=agents, fate=st.sampled_from(["taken"] * 6 + ["answer lost", "lost", "twice", "restarts"]))
    def flight(self, agent: int, fate: str) -> None:
        publisher = self.agents[agent].publisher
        for shard, entries in publisher.take().items():
            if fate == "restarts":
                self.late += [(shard, entry) for entry in entries]
                continue
            answers = [self.redis[shard].apply(entry) for entry in entries if fate != "lost"]
            if fate == "twice":
                answers = [self.redis[shard].apply(entry) for entry in entries]
            if fate in ("answer lost", "lost"):
                publisher.failed(shard)
                self.late += [(shard, entry) for entry in entries if fate == "lost"]
            else:
                publisher.answered(shard, answers)
        if fate == "restarts":
            self.agents[agent].incarnation += 1
            self.agents[agent].start()

    @rule(agent=agents)
    def beat(self, agent: int) -> None:
        self.beat_all(self.agents[agent])

    def beat_all(self, agent: Agent) -> None:
        agent.beat += 1
        for shard, redis in enumerate(self.redis):
            told = agent.publisher.told(shard)
            if told is not None:
                agent.publisher.compare(shard, *redis.beat(agent.code, told, agent.beat))
        for shard in agent.publisher.differing:
            agent.publisher.reconcile(shard, list(self.redis[shard].held(agent.code)))

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def late_update(self, data: st.DataObject) -> None:
        shard, entry = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        self.redis[shard].apply(entry)

    @rule(agent=agents)
    def registration(self, agent: int) -> None:
        self.agents[agent].registered = not self.agents[agent].registered

    # -- Redis

    @rule()
    def copy(self) -> None:
        self.copies = [*self.copies[-2:], copy.deepcopy(self.redis)]

    @precondition(lambda self: self.copies)
    @rule(which=st.integers(0, 2), only=st.one_of(st.none(), shards))
    def failover(self, which: int, only: int | None) -> None:
        old = copy.deepcopy(self.copies[which % len(self.copies)])
        for shard in range(SHARDS):
            if only in (None, shard):
                self.redis[shard] = old[shard]

    @rule(only=st.one_of(st.none(), shards), clock=st.booleans())
    def flush(self, only: int | None, clock: bool) -> None:
        """Ids are clock readings: they go on after a flush, unless the clock of the new server is behind."""
        for shard in range(SHARDS):
            if only in (None, shard):
                self.redis[shard] = ShardTwin(last=self.redis[shard].last if clock else 0)

    @rule(shard=shards, keep=st.integers(0, 2))
    def trim(self, shard: int, keep: int) -> None:
        self.redis[shard].trim(keep)

    @rule(shard=shards, what=st.sampled_from(["blocks", "taken", "told"]))
    def a_key_vanishes(self, shard: int, what: str) -> None:
        """What no script does: Redis evicts memory."""
        getattr(self.redis[shard], what).clear()

    @rule()
    def sweeper_sees(self) -> None:
        known = {c for redis in self.redis for c in (*redis.taken, *redis.told, *redis.codes())}
        self.dead = [c for c in sorted(known) if c not in self.living()]

    @rule()
    def sweeper_sweeps(self) -> None:
        for redis in self.redis:
            redis.sweep(self.dead)
        self.dead = []

    # -- mirrors

    @rule(which=st.integers(0, 1), most=st.integers(1, 5), only=st.one_of(st.none(), shards))
    def follow(self, which: int, most: int, only: int | None) -> None:
        mirror = self.mirrors[which]
        read = {}
        for shard, redis in enumerate(self.redis):
            cursor = mirror.cursor(shard)
            if cursor is not None and only in (None, shard):
                read[shard] = redis.read(cursor)[:most]
        mirror.apply(read, self.now)

    @rule(which=st.integers(0, 1))
    def look(self, which: int) -> None:
        mirror = self.mirrors[which]
        self.tell_living(which)
        for shard, redis in enumerate(self.redis):
            tip, _, told = redis.tip()
            mirror.look(shard, tip, told)

    @rule(which=st.integers(0, 1))
    def resync(self, which: int) -> None:
        """All that is due, except that entries may be applied by Redis between its steps: see the next rule."""
        self.now += 20
        while (shard := self.mirrors[which].due(self.now)) is not None:
            self.begin_scan(which, shard)
            self.end_scan(which, shard)

    @rule(which=st.integers(0, 1), path=paths)
    def resync_while_the_shard_changes(self, which: int, path: list[int]) -> None:
        self.now += 20
        shard = self.mirrors[which].due(self.now)
        if shard is not None:
            self.begin_scan(which, shard)
            self.agents[0].publisher.committed(b"", chain(path))
            self.flight(0, "taken")
            self.end_scan(which, shard)

    def begin_scan(self, which: int, shard: int) -> None:
        tip, taken, _ = self.redis[shard].tip()
        self.mirrors[which].begin(shard, tip, taken)

    def end_scan(self, which: int, shard: int) -> None:
        mirror, redis = self.mirrors[which], self.redis[shard]
        for k, places in redis.blocks.items():
            mirror.page(shard, {k: b"".join(c + bytes([tier]) for c, tier in places.items())})
        for _ in mirror.finish(shard, redis.tip()[0], self.now):
            mirror.prefix.tidy(1)

    @rule(which=st.integers(0, 1), most=st.integers(1, 5), after=st.integers(0, 3), late=st.booleans())
    def a_change_breaks(self, which: int, most: int, after: int, late: bool) -> None:
        """Before or after one of the columns' changes; nothing half-done may stay."""
        with Breaking(after, late) as breaking:
            try:
                self.follow(which, most, None)
                self.resync(which)
            except Breakdown:
                breaking.done = True
        if breaking.done:
            assert not self.mirrors[which].columns and not self.mirrors[which].synced

    @rule(which=st.integers(0, 1))
    def mirror_restarts(self, which: int) -> None:
        self.mirrors[which] = Mirror(SHARDS)
        self.told_living[which] = set()

    @rule(which=st.integers(0, 1))
    def tidy(self, which: int) -> None:
        self.now += 70
        self.tell_living(which)
        self.mirrors[which].prefix.tidy(2)

    def tell_living(self, which: int) -> None:
        self.told_living[which] = set(self.living())
        self.mirrors[which].living(self.told_living[which], self.now)

    # -- what must hold

    @invariant()
    def the_dead_do_not_count(self) -> None:
        if hasattr(self, "mirrors"):
            for mirror, living in zip(self.mirrors, self.told_living, strict=True):
                assert set(mirror.match(b"".join(chain([0] * 6)))) <= living

    @rule()
    def a_mirror_counts_what_it_holds(self) -> None:
        for mirror in self.mirrors:
            for shard, known in enumerate(mirror._shards):
                for c, state in known.states.items():
                    assert state[1:] == state_of(self.at_mirror(mirror, c, shard)), (shard, c)

    def at_mirror(self, mirror: Mirror, c: bytes, shard: int) -> dict[bytes, int]:
        column = mirror.columns.get(c)
        if column is None:
            return {}
        tiers = {k: mirror.prefix.tier(column, k) for k in UNIVERSE[shard]}
        return {k: tier for k, tier in tiers.items() if tier >= 0}

    def teardown(self) -> None:
        """No more faults: all converge in a few rounds, and then nothing is published or read again."""
        if not hasattr(self, "mirrors"):
            return
        self.a_mirror_counts_what_it_holds()
        for agent in self.agents:
            agent.registered = True
        for _ in range(12):
            self.sweeper_sees()
            self.sweeper_sweeps()
            for agent in self.agents:
                for _ in range(4):
                    for shard, entries in agent.publisher.take().items():
                        agent.publisher.answered(shard, [self.redis[shard].apply(entry) for entry in entries])
                self.beat_all(agent)
            for which in (0, 1):
                self.look(which)
                self.follow(which, 10**6, None)
                self.resync(which)
                self.follow(which, 10**6, None)
        self.converged()
        counts = [agent.publisher.republished for agent in self.agents], [m.differences.copy() for m in self.mirrors]
        for _ in range(4):
            for agent in self.agents:
                self.beat_all(agent)
            for which in (0, 1):
                self.look(which)
        assert counts == ([a.publisher.republished for a in self.agents], [m.differences for m in self.mirrors])

    def converged(self) -> None:
        for agent in self.agents:
            assert agent.publisher.synced
            for shard, redis in enumerate(self.redis):
                inventory = agent.publisher.inventory(shard)
                assert redis.held(agent.code) == inventory
                assert redis.taken.get(agent.code, State())[1:] == state_of(inventory)
                for mirror in self.mirrors:
                    assert self.at_mirror(mirror, agent.code, shard) == inventory
        codes = {c for redis in self.redis for places in redis.blocks.values() for c in places}
        assert codes <= {agent.code for agent in self.agents}
        assert all(mirror.synced for mirror in self.mirrors)


EXAMPLES = examples(25)
PHASES = [phase for phase in Phase if EXAMPLES < 50 or phase != Phase.shrink]  # a long search is not shrunk as well
Protocol.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None, phases=PHASES)
TestProtocol = Protocol.TestCase
