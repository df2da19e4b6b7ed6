"""What of a prompt is still to be computed, chunk by chunk. Pure.

Blocks are numbered from 0. A block is *ready* when its KV is in a committed slot. Of a prompt whose blocks are all
ready and full, the last token is recomputed into a private copy of the last block, since committed blocks are never
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Block(Enum):
    """``READY`` blocks are never written by us, ``OURS`` are, ``AWAITED`` ones are being written by somebody else."""

    READY = 0
    OURS = 1
    AWAITED = 2


@dataclass(frozen=True)
class Chunk:
    """Compute tokens [start, stop)."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def blocks(self, block_size: int) -> range:
        """Blocks that it touches."""
        return range(self.start // block_size, -(-self.stop // block_size))

    def filled(self, block_size: int) -> range:
        """Blocks that are complete once it is computed, given that all before it is there."""
        return range(self.start // block_size, self.stop // block_size)


@dataclass(frozen=True)
class Await:
    """Block ``block`` must come, or be taken over, before anything after it can be computed."""

    block: int


def repeats_last(blocks: Sequence[Block], tokens: int, block_size: int) -> bool:
    """True when everything is ready, so that only the last token is recomputed, privately."""
    return tokens % block_size == 0 and blocks[-1] is Block.READY


def next_step(blocks: Sequence[Block], done: int, tokens: int, block_size: int, limit: int) -> Chunk | Await | None:
    """The next thing to do when all tokens before ``done`` are there: compute a chunk of at most ``limit`` tokens (it
    ends where a block ends), wait for a block, or None at the end of the prompt."""
    at = done
    while at < tokens and blocks[at // block_size] is Block.READY:
        at = (at // block_size + 1) * block_size
    if at >= tokens:
        return Chunk(tokens - 1, tokens) if done < tokens and repeats_last(blocks, tokens, block_size) else None
    if blocks[at // block_size] is Block.AWAITED:
        return Await(at // block_size)
    stop = at
    while (
        stop < tokens and blocks[stop // block_size] is Block.OURS and stop - at + block_size <= max(limit, block_size)
    ):
        stop += block_size
    return Chunk(at, min(stop, tokens))
