"""From runs of a stream to byte ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shared.blocks import Geometry
from shared.errors import InvalidInput

RunTuple = tuple[int, int, int, int, int, int]
"""(slot, block, first_layer, last_layer, first_token, last_token), ends exclusive."""


@dataclass(frozen=True)
class Move:
    """``length`` bytes from offset ``source`` of our slab to offset ``target`` of the other one."""

    source: int
    target: int
    length: int


def check_run(run: RunTuple, slots: int, blocks: int, geometry: Geometry) -> None:
    """Raises InvalidInput for a run that is empty or leaves its slot, its block or the landing."""
    slot, block, first_layer, last_layer, first_token, last_token = run
    layers = 0 <= first_layer < last_layer <= geometry.layers
    tokens = 0 <= first_token < last_token <= geometry.block_size
    if not (0 <= slot < slots and 0 <= block < blocks and layers and tokens):
        raise InvalidInput(f"run {run} is empty or out of range", field="runs")


def moves_of(runs: Iterable[RunTuple], target_slots: Sequence[int], stride: int, geometry: Geometry) -> list[Move]:
    """Byte ranges of the runs, adjacent ones joined where they are adjacent at both ends."""
    out: list[Move] = []
    for move in sorted(_pieces(runs, target_slots, stride, geometry), key=lambda m: m.source):
        last = out[-1] if out else None
        if last and last.source + last.length == move.source and last.target + last.length == move.target:
            out[-1] = Move(last.source, last.target, last.length + move.length)
        else:
            out.append(move)
    return out


def _pieces(runs: Iterable[RunTuple], target_slots: Sequence[int], stride: int, g: Geometry) -> Iterator[Move]:
    for slot, block, first_layer, last_layer, first_token, last_token in runs:
        source, target = slot * stride, target_slots[block] * stride
        if last_token - first_token == g.block_size and last_layer - first_layer == g.layers:
            yield Move(source, target, g.slot_bytes)  # of an opaque layout, only this is known
            continue
        if last_token - first_token == g.block_size:  # whole layers: one range
            at, length = first_layer * g.layer_bytes, (last_layer - first_layer) * g.layer_bytes
            yield Move(source + at, target + at, length)
            continue
        for layer in range(first_layer, last_layer):
            at = layer * g.layer_bytes + first_token * g.token_bytes
            yield Move(source + at, target + at, (last_token - first_token) * g.token_bytes)
