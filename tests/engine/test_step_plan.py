"""The index tensors of a step, against a plain reading of what each query may see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.engines.base import Work
from shared.engines.plan import Plan, Rows
from shared.errors import InvalidInput

B = 4


@st.composite
def batches(draw: st.DrawFn) -> list[Work]:
    works, slot = [], 0
    for _ in range(draw(st.integers(1, 6))):
        count, start = draw(st.sampled_from([1, 1, 1, 2, 5, 9])), draw(st.integers(0, 60))
        blocks = -(-(start + count) // B) + draw(st.integers(0, 2))
        works.append(Work(np.full(count, 7, np.uint32), start, list(range(slot, slot + blocks))))
        slot += blocks
    return works


def visible(work: Work, position: int, window: int) -> set[tuple[int, int]]:
    """(slot, offset) of every token that a query at ``position`` sees."""
    low = max(0, position + 1 - window) if window else 0
    return {(work.slots[at // B], at % B) for at in range(low, position + 1)}


def row_sees(rows: Rows, number: int) -> set[tuple[int, int]]:
    table = rows.slots.view(rows.last - rows.first, -1)[number].tolist()
    places = [(slot, offset) for slot in table for offset in range(B)]
    seen = [True] * len(places) if rows.mask is None else (rows.mask[number, 0, 0] == 0).tolist()
    return {place for place, yes in zip(places, seen, strict=True) if yes}


@given(batches(), st.sampled_from([0, 1, 3, 4, 10]), st.sampled_from([1, 8, 1000]))
def test_every_query_sees_exactly_its_window(works: list[Work], window: int, together: int) -> None:
    plan = Plan(works, B, 1000, 100, torch.float32, together)
    view = plan.view(window)
    firsts = np.cumsum([0, *[len(work.tokens) for work in works]])[:-1].tolist()
    at = dict(zip(firsts, works, strict=True))
    done = set()
    order = list(range(plan.count)) if view.order is None else view.order.tolist()
    assert [rows.last for rows in view.rows[:-1]] == [rows.first for rows in view.rows[1:]]
    for rows in view.rows:
        for number, first in enumerate(order[rows.first : rows.last]):
            done.add(first)
            assert row_sees(rows, number) == visible(at[first], at[first].start, window)
    for chunk in view.chunks:
        done.add(chunk.first)
        work = at[chunk.first]
        assert chunk.last - chunk.first == len(work.tokens)
        if chunk.slots is None or chunk.mask is None:
            assert work.start == 0 and not 0 < window < len(work.tokens)
            continue
        places = [(slot, offset) for slot in chunk.slots.tolist() for offset in range(B)][: chunk.keys]
        for i in range(len(work.tokens)):
            seen = {place for place, m in zip(places, chunk.mask[0, 0, i].tolist(), strict=True) if m == 0}
            assert seen == visible(work, work.start + i, window)
    assert done == set(firsts)


@given(batches())
def test_writes_go_to_each_tokens_own_place(works: list[Work]) -> None:
    plan = Plan(works, B, 1000, 100, torch.float32)
    expected = [
        (work.slots[at // B], at % B, at) for work in works for at in range(work.start, work.start + len(work.tokens))
    ]
    found = zip(plan.slots.tolist(), plan.offsets.tolist(), plan.positions[0].tolist(), strict=True)
    assert list(found) == expected


def test_bytes_of_nobody_are_named() -> None:
    """Two rows, of 5 and of 2 positions, in blocks of 4: three unused places in the first, six in the second."""
    works = [Work(np.array([1], np.uint32), 4, [8, 9]), Work(np.array([1], np.uint32), 1, [5])]
    [rows] = Plan(works, B, 100, 100, torch.float32).view().rows
    assert rows.unused is not None
    assert rows.unused.tolist() == [5, 6, 7, 10, 11, 12, 13, 14, 15]


def test_short_rows_do_not_pay_for_long_ones() -> None:
    works = [Work(np.array([1], np.uint32), n * B, range(n + 1)) for n in (1, 40, 2, 200, 30)]
    groups = Plan(works, B, 1000, 100, torch.float32).view().rows
    assert [rows.last - rows.first for rows in groups] == [1, 2, 2]
    padded = sum(len(rows.slots) for rows in groups)
    assert padded < 2 * sum(len(work.slots) for work in works)


def test_rows_gather_no_more_than_was_said() -> None:
    works = [Work(np.array([1], np.uint32), n * B, range(n + 1)) for n in (3, 3, 3, 3, 20)]
    groups = Plan(works, B, 1000, 100, torch.float32, 8).view().rows
    assert [len(rows.slots) for rows in groups] == [21, 8, 8]


def test_sequence_with_too_few_slots_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Plan([Work(np.ones(5, np.uint32), 0, [1])], B, 100, 100, torch.float32)
