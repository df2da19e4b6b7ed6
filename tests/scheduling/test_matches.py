"""Matches as columns say what the mapping says, to readers with rows of their own in any order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.scheduling import Matches
from services.conductor.scheduling.agents import Agents
from services.conductor.scheduling.matches import Gather

agents = st.lists(st.sampled_from([f"a{n}" for n in range(9)]), unique=True)


@given(st.lists(st.tuples(agents, st.booleans(), st.integers(0, 2**32)), min_size=1, max_size=5), agents)
def test_rows_are_found_whatever_the_columns(asked: list[tuple[list[str], bool, int]], wanted: list[str]) -> None:
    gather, before = Gather(wanted), None
    for ids, same, seed in asked:
        columns = before.ids if same and before is not None else tuple(ids)
        before = matches = Matches(columns, np.random.default_rng(seed).integers(0, 5, len(columns)))
        pairs = dict(zip(columns, matches.blocks.tolist(), strict=True))
        assert gather.blocks(matches).tolist() == [pairs.get(id, 0) for id in wanted]
        assert dict(matches) == {id: blocks for id, blocks in pairs.items() if blocks}
        assert Matches.of(matches) is matches
        assert Gather(wanted).blocks(Matches.of(pairs)).tolist() == [pairs.get(id, 0) for id in wanted]


@given(
    st.dictionaries(st.sampled_from([f"a{n}" for n in range(9)]), st.integers(0, 3)),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(0, 5), st.booleans()), max_size=12),
    st.integers(0, 2**32),
)
def test_sources_are_those_that_sorting_all_would_give(
    matches: dict[str, int], moves: list[tuple[int, int, int, bool]], seed: int
) -> None:
    """Longest, then least on SSD, then least to send: against the order of plain tuples, as agents come, report, get
    plans and go."""
    table, rng = Agents(1e6), np.random.default_rng(seed)
    for booking, (number, backlog, planned, stays) in enumerate(moves):
        id = f"a{number}"
        if stays:
            table.put(id, 1e6, 1e6 * backlog, True)
            table.book(booking, id, 1e6 * planned, 1.0 + planned % 2)
        else:
            table.remove(id)
        if planned == 3:
            table.end(booking, id)
    dram = {id: int(rng.integers(0, blocks + 1)) for id, blocks in matches.items() if rng.random() < 0.4}
    view = table.view(1.5, matches, dram)
    rows = [
        (-blocks, blocks - dram.get(id, blocks), table.seats[id].queued(1.5) / 1e6)
        for id, blocks in matches.items()
        if blocks and id in table.seats
    ]
    got = [
        (-blocks, blocks - fast, backlog / 1e6)
        for blocks, fast, backlog in zip(view.blocks, view.dram, view.backlog, strict=True)
    ]
    assert got == sorted(rows)[:4]
    assert all(matches[id] == blocks for id, blocks in zip(view.agents, view.blocks, strict=True))
