"""Layers grouped into runs: every byte of every chunk exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.groups import GROUP_BYTES, GROUP_SECONDS, LayerGroups, chunk_runs, run_bytes, whole_run
from services.prefill.plan import Chunk
from shared.blocks import Geometry

GEOMETRY = Geometry(layers=6, block_size=16, kv_heads=2, head_dim=8, dtype="float32")
LARGE = Geometry(layers=6, block_size=256, kv_heads=8, head_dim=128, dtype="float32")


def test_small_and_quick_layers_go_together() -> None:
    groups = LayerGroups(GEOMETRY, 16, began=0.0)
    assert [groups.layer(i, 0.0) for i in range(6)] == [None] * 5 + [(0, 6)]


def test_slow_layers_go_as_they_come() -> None:
    groups = LayerGroups(GEOMETRY, 16, began=0.0)
    found = [groups.layer(i, (i + 1) * GROUP_SECONDS * 0.6) for i in range(6)]
    assert found == [None, (0, 2), None, (2, 4), None, (4, 6)]


def test_large_layers_go_as_they_come() -> None:
    groups = LayerGroups(LARGE, 256, began=0.0)
    assert LARGE.token_bytes * 256 * 2 >= GROUP_BYTES
    assert [groups.layer(i, 0.0) for i in range(6)] == [None, (0, 2), None, (2, 4), None, (4, 6)]


@given(start=st.integers(0, 50), length=st.integers(1, 60), times=st.lists(st.floats(0, 0.01), min_size=6, max_size=6))
def test_every_layer_and_token_once(start: int, length: int, times: list[float]) -> None:
    chunk, now = Chunk(start, start + length), 0.0
    groups, seen = LayerGroups(GEOMETRY, length, 0.0), list[tuple[int, int]]()
    slots = list(range(100, 110))
    total = 0
    for layer, took in enumerate(times):
        now += took
        if group := groups.layer(layer, now):
            for run in chunk_runs(chunk, slots, 16, group):
                assert run.slot == slots[run.block]
                tokens = range(run.block * 16 + run.first_token, run.block * 16 + run.last_token)
                seen += [(layer, t) for layer in range(run.first_layer, run.last_layer) for t in tokens]
                total += run_bytes(run, GEOMETRY)
    assert sorted(seen) == [(layer, t) for layer in range(6) for t in range(start, start + length)]
    assert total == 6 * length * GEOMETRY.token_bytes


def test_whole_run_of_a_partial_block() -> None:
    run = whole_run(3, 9, 5, GEOMETRY)
    assert (run.block, run.slot, run.first_token, run.last_token, run.last_layer) == (3, 9, 0, 5, 6)
