"""A running sequence: works, keys and commits of its blocks; the batch it runs in."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.decode.batch import Batch
from services.decode.sequence import Sequence
from shared.blocks import KEY, chain_keys, pack_tokens, split_keys
from shared.engines.base import Held, Kind
from shared.instance.job import Prompt
from shared.messages import Admission, Ref, Sampling

SIZE = 4
ROOT = bytes(KEY)
GATEWAY = Ref("g", 1)


def sequence_of(
    tokens: int, *, name: str = "r", born: float = 0.0, shared: frozenset[int] = frozenset(), **sampling: Any
) -> Sequence:
    array = np.arange(tokens, dtype=np.uint32)
    options: dict[str, Any] = {"max_tokens": 100, "seed": 1} | sampling
    admission = Admission(
        gateway=GATEWAY,
        tokens=pack_tokens(array),
        prompt_tokens=tokens,
        root=ROOT,
        keys=chain_keys(ROOT, array, SIZE),
        sampling=Sampling(**options),
        lists=0,
    )
    held = [Held(i + 1, 10 + i, Kind.NEW) for i in range(-(-tokens // SIZE))]
    return Sequence((name, 1), GATEWAY, Prompt(admission, SIZE), born, held, shared)


def grow(sequence: Sequence) -> None:
    if sequence.wants_slot:
        sequence.held.append(Held(100 + len(sequence.held), 50 + len(sequence.held), Kind.NEW))


def test_work_writes_the_last_token_and_draws_the_next() -> None:
    sequence = sequence_of(6)
    sequence.push(77)
    work = sequence.work()
    assert (list(work.tokens), work.start, list(work.slots)) == ([77], 6, [10, 11])
    assert work.draw and work.draw.outputs is not None and work.draw.prompt is not None
    assert (work.draw.position, list(work.draw.outputs), len(work.draw.prompt)) == (1, [77], 6)
    sequence.stepped()
    output = sequence.accept(78, 1000)
    assert (output.index, output.token, output.finish, sequence.done) == (1, 78, "", 7)


def test_wants_a_slot_at_the_edge() -> None:
    sequence = sequence_of(8)
    sequence.push(1)
    assert sequence.wants_slot
    grow(sequence)
    assert not sequence.wants_slot


def test_finish_reasons() -> None:
    assert sequence_of(4, max_tokens=1).accept(5, 1000).finish == "length"
    assert sequence_of(4, stop_ids=[5]).accept(5, 1000).finish == "stop"
    assert sequence_of(4).accept(5, 5).finish == "length"  # the context is full
    assert sequence_of(4).accept(5, 6).finish == ""


@given(prompt=st.integers(1, 20), drawn=st.integers(1, 30), shared=st.sets(st.integers(0, 4)))
def test_every_full_block_is_committed_once_under_its_chain(prompt: int, drawn: int, shared: set[int]) -> None:
    shared = {i for i in shared if i < prompt // SIZE}
    sequence = sequence_of(prompt, shared=frozenset(shared))
    runs = sequence.filled()
    sequence.push(1000)
    for i in range(drawn):
        grow(sequence)
        sequence.work()
        sequence.stepped()
        sequence.accept(2000 + i, 10_000)
        runs += sequence.filled()
    tokens = np.array([*range(prompt), 1000, *range(2000, 2000 + drawn)], dtype=np.uint32)
    chain = split_keys(chain_keys(ROOT, tokens, SIZE))
    full = (prompt + drawn) // SIZE  # the last token has no KV yet
    got = {
        run.first + i: (key, held)
        for run in runs
        for i, (key, held) in enumerate(zip(run.keys, run.holds, strict=True))
    }
    assert set(got) == set(range(full)) - shared
    assert all(key == chain[block] and held is sequence.held[block] for block, (key, held) in got.items())
    assert all(run.parent == (chain[run.first - 1] if run.first else ROOT) for run in runs)
    assert sum(len(run.keys) for run in runs) == len(got)


def test_last_token_that_fills_a_block_is_flushed_without_a_draw() -> None:
    sequence = sequence_of(6)
    sequence.push(1)
    sequence.stepped()
    assert [sequence.fills_with_last, bool(sequence.accept(2, 1000)), sequence.fills_with_last] == [False, True, True]
    sequence.flushing = True
    assert sequence.work().draw is None
    sequence.stepped()
    assert [(run.first, len(run.keys)) for run in sequence.filled()] == [(0, 2)]


def test_batch_joins_the_oldest_up_to_its_limit() -> None:
    batch = Batch(2)
    young, old, middle = (sequence_of(4, name=n, born=b) for n, b in (("y", 3.0), ("o", 1.0), ("m", 2.0)))
    for sequence in (young, old, middle):
        batch.add(sequence)
    assert batch.join() == [old, middle]
    assert batch.join() == []
    assert batch.youngest() is young
    batch.remove(old)
    batch.remove(old)
    assert batch.join() == [young]
    assert (len(batch), batch.kv_tokens) == (2, 8)


def test_starving_are_served_oldest_first() -> None:
    batch = Batch(4)
    young, old, fine = sequence_of(4, name="y", born=3.0), sequence_of(8, name="o", born=1.0), sequence_of(5)
    for sequence in (young, old, fine):
        sequence.push(1)
        batch.add(sequence)
    batch.join()
    assert batch.starving() == [old, young]
