"""The simulated engine's KV: bytes that depend on every token before, so that a wrong block shows. numpy only.

The state of position i is the state of i-1 plus a mix of (i, token i), modulo 2^64. A cell of the pool (one token in
one layer) is that state plus a constant of the layer, repeated. So a chunk of thousands of tokens is one running sum,
and any block can be checked alone, by the differences of its neighbouring states.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.blocks import Geometry, Tokens
from shared.engines.base import PoolMap
from shared.errors import ConfigError, NamespaceMismatch

Words = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]

WORD = 8
ROOT = np.uint64(0x6D6F6F6E63616B65)
LAYERS = np.arange(1 << 12, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
"""What each layer adds to a state."""


def mix(words: Words) -> Words:
    """Each word to another, all bits of which depend on all bits of the first (the finalizer of splitmix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def shares(tokens: npt.NDArray[np.uint32], positions: Index) -> Words:
    """What ``tokens[i]`` at ``positions[i]`` adds to the state."""
    return mix((positions.astype(np.uint64) << np.uint64(32)) | tokens.astype(np.uint64))


def states(before: np.uint64, tokens: Tokens, start: int) -> Words:
    """States of ``tokens`` at positions ``start ..``, after the state ``before``."""
    return before + np.cumsum(shares(tokens, np.arange(start, start + len(tokens))), dtype=np.uint64)


class SimulatedPool:
    """The pool as words ``[slot][layer][token][word]``: a view of the mapped file, never a copy."""

    def __init__(self, pool: PoolMap, geometry: Geometry) -> None:
        for name in Geometry.__dataclass_fields__:
            theirs, ours = getattr(pool.geometry, name), getattr(geometry, name)
            if theirs != ours:
                raise NamespaceMismatch(f"pool has {name} {theirs}, the engine {ours}", field=name)
        if pool.offset % WORD or pool.stride % WORD:
            raise ConfigError(f"pool offset {pool.offset} or stride {pool.stride} is not a multiple of 8", field="pool")
        self.block_size, self.layers = geometry.block_size, geometry.layers
        shape = (pool.slots, geometry.layers, geometry.block_size, geometry.token_bytes // WORD)
        strides = (pool.stride, geometry.layer_bytes, geometry.token_bytes, WORD)
        memory = _mapped(pool.path, pool.offset + (pool.slots - 1) * pool.stride + geometry.slot_bytes)
        self._words: Words = np.ndarray(shape, np.uint64, memory, pool.offset, strides)

    def write(self, layer: int, slots: Index, offsets: Index, states: Words) -> None:
        """Put ``states[i]`` at token ``offsets[i]`` of ``slots[i]``."""
        self._words[slots, layer, offsets] = (states + LAYERS[layer])[:, None]

    def read(self, layer: int, slots: Index, offsets: Index) -> Words:
        """The states as they are in the pool now. Where the words of a cell differ from each other, a state that no
        neighbour fits."""
        cells = self._words[slots, layer, offsets]
        torn = (cells[:, -1] != cells[:, 0]).astype(np.uint64)
        read: Words = cells[:, 0] - LAYERS[layer] + torn
        return read

    def before(self, slots: Sequence[int], position: int) -> np.uint64:
        """The state that ``position`` continues."""
        return self.state(slots, position - 1) if position else ROOT

    def state(self, slots: Sequence[int], position: int) -> np.uint64:
        block, token = divmod(position, self.block_size)
        found: np.uint64 = self._words[slots[block], 0, token, 0]
        return found


def _mapped(path: str, size: int) -> mmap.mmap:
    """Raises ConfigError when the file is smaller than ``size`` bytes."""
    fd = os.open(path, os.O_RDWR)
    try:
        if (there := os.fstat(fd).st_size) < size:
            raise ConfigError(f"pool file has {there} bytes, {size} are needed", field="pool")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
