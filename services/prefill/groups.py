"""Layers of a chunk, grouped into runs worth a stream call of their own. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.prefill.plan import Chunk
from shared.blocks import Geometry
from shared.engines.base import Run

GROUP_BYTES = 4 << 20
GROUP_SECONDS = 0.05
"""A call costs milliseconds of the processors that compute; what a group makes wait at the end of a chunk is bounded by
its bytes alone."""


@dataclass
class LayerGroups:
    """Cuts a chunk's layers where ``GROUP_BYTES`` have gathered or ``GROUP_SECONDS`` of compute have passed."""

    geometry: Geometry
    tokens: int
    began: float
    first: int = 0

    def layer(self, layer: int, now: float) -> tuple[int, int] | None:
        """Layer ``layer`` is in the pool: the group [first, last) to stream now, or None to wait for more."""
        gathered = (layer + 1 - self.first) * self.tokens * self.geometry.token_bytes
        last = layer == self.geometry.layers - 1
        if not last and gathered < GROUP_BYTES and now - self.began < GROUP_SECONDS:
            return None
        group = (self.first, layer + 1)
        self.first, self.began = layer + 1, now
        return group


def chunk_runs(chunk: Chunk, slots: Sequence[int], block_size: int, layers: tuple[int, int]) -> Iterator[Run]:
    """Runs of the given layers for every block that the chunk touches."""
    for block in chunk.blocks(block_size):
        start = max(chunk.start - block * block_size, 0)
        stop = min(chunk.stop - block * block_size, block_size)
        yield Run(slots[block], block, layers[0], layers[1], start, stop)


def whole_run(block: int, slot: int, tokens: int, geometry: Geometry) -> Run:
    """All layers of the first ``tokens`` tokens of a block."""
    return Run(slot, block, 0, geometry.layers, 0, tokens)


def run_bytes(run: Run, geometry: Geometry) -> int:
    return (run.last_layer - run.first_layer) * (run.last_token - run.first_token) * geometry.token_bytes
