"""Entries taken together are what they are one by one, whatever comes between them."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.blocks import KEY, split_keys
from shared.index import code
from shared.index.entry import unpack
from shared.index.lines import Line
from shared.index.mirror import Mirror
from shared.index.publisher import Publisher
from shared.index.twin import OK
from tests.examples import examples

AGENTS = [code(n) for n in (1, 2, 3)]


def stream(rng: random.Random, steps: int) -> tuple[list[tuple[int, bytes]], list[list[bytes]]]:
    """What three agents say, and the chains they speak of: they grow, fork, are fetched in pieces and evicted."""
    publishers = [Publisher(agent, 1) for agent in AGENTS]
    chains = [split_keys(rng.randbytes(KEY * 60)) for _ in range(3)]
    chains.append(chains[0][:20] + split_keys(rng.randbytes(KEY * 30)))
    said: list[tuple[int, bytes]] = []
    for _ in range(steps):
        publisher, chain = rng.choice(publishers), rng.choice(chains)
        for _ in range(rng.randrange(1, 4)):  # at times several changes before anything is sent
            at = rng.randrange(len(chain))
            some = chain[at : at + rng.choice([1, 4, 16])]
            if rng.random() < 0.3:
                publisher.evicted(some[:: rng.choice([1, -1])])
            else:
                parent = rng.choice([b"", None]) if at == 0 else rng.choice([chain[at - 1]] * 3 + [None])
                publisher.committed(parent, some, rng.choice([0, 0, 0, 1]))
        if rng.random() < 0.05:
            publisher.start_over()
        while flights := publisher.take():
            said += [(len(said) + at, entry) for at, entry in enumerate(flights[0], 1)]
            publisher.answered(0, [(OK, unpack(entry).state) for entry in flights[0]])
    return said, chains


def follower() -> Mirror:
    mirror = Mirror(1)
    mirror.begin(0, 0, {})
    for _ in mirror.finish(0, 0, 0.0):
        pass
    mirror.living(AGENTS, 0.0)
    return mirror


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_together_as_one_by_one(seed: int, portion: int) -> None:
    said, chains = stream(random.Random(seed), 30)
    together, single = follower(), follower()
    for at in range(0, len(said), portion):
        together.apply({0: said[at : at + portion]}, 0.0)
    for entry in said:
        single.apply({0: [entry]}, 0.0)
    assert together.differences == single.differences == {"new": 1} or not together.differences
    assert together.cursor(0) == single.cursor(0) == said[-1][0]
    assert together.blocks() == single.blocks() and together.applied == single.applied
    for chain in chains:
        assert together.match(b"".join(chain)) == single.match(b"".join(chain))
        for agent in together.columns.keys() | single.columns.keys():
            tiers = [[m.prefix.tier(m.columns[agent], key) for key in chain] for m in (together, single)]
            assert tiers[0] == tiers[1]


def test_commits_of_one_chain_are_one_line_and_what_is_not_its_next_is_not_taken() -> None:
    publisher, chain = Publisher(AGENTS[0], 1), split_keys(random.Random(1).randbytes(KEY * 64))
    said: list[tuple[int, bytes]] = []
    for at in range(0, 64, 16):
        publisher.committed(chain[at - 1] if at else b"", chain[at : at + 16])
        (entries,) = publisher.take().values()
        said += [(len(said) + n, entry) for n, entry in enumerate(entries, 1)]
        publisher.answered(0, [(OK, unpack(entry).state) for entry in entries])
    line = Line.of(0, unpack(said[0][1]))
    assert line is not None and line.take(said, 1) == 4
    assert b"".join(line.pieces) == b"".join(chain) and line.state == unpack(said[3][1]).state
    for changed in (said[2], (2, said[1][1][:-1]), (2, said[1][1] + b"x"), (2, b""), (2, said[1][1][:30])):
        line = Line.of(0, unpack(said[0][1]))
        assert line is not None and line.take([said[0], changed], 1) == 1
