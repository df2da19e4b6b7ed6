"""The engine's in-memory twin: no model, but KV that matters.

The KV of a position is a digest of the token and of the KV before it; a drawn token is a digest of the KV of *all*
positions in *all* layers, read from the pool. A block that is missing, late, torn or another's changes every token
that follows, as it would in a model, and so tests can compare token streams exactly.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.blocks import Geometry, Namespace
from shared.engines.base import Drawn, LayerHook, PoolMap, Work
from shared.errors import ConfigError, NamespaceMismatch

LAYERS = 3


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=32).digest()


class MemoryEngine:
    """Deterministic; ``vocabulary`` tokens, of which ``eos_ids`` end. ``token_seconds`` slows every token down."""

    def __init__(self, *, block_size: int = 16, vocabulary: int = 50, context_length: int = 4096) -> None:
        self.namespace = Namespace(
            model="memory",
            weights="none",
            tokenizer="none",
            dtype="float32",
            layers=LAYERS,
            kv_heads=1,
            head_dim=4,
            block_size=block_size,
        )
        self.context_length = context_length
        self.eos_ids: frozenset[int] = frozenset({0})
        self.vocabulary = vocabulary
        self.token_seconds = 0.0
        self.fail_on: int | None = None
        self.steps = 0
        self.computed = 0
        self._memory: npt.NDArray[np.uint8] | None = None

    @property
    def geometry(self) -> Geometry:
        return self.namespace.geometry

    def bind(self, pool: PoolMap) -> None:
        if pool.geometry != self.geometry:
            raise NamespaceMismatch("the pool has another geometry", field="geometry")
        fd = os.open(pool.path, os.O_RDWR)
        try:
            flat = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)
        finally:
            os.close(fd)
        size = self.geometry
        rows = flat[pool.offset : pool.offset + pool.slots * pool.stride].reshape(pool.slots, pool.stride)
        self._memory = rows[:, : size.slot_bytes].reshape(pool.slots, LAYERS, size.block_size, size.token_bytes)

    def unbind(self) -> None:
        self._memory = None

    def step(self, batch: Sequence[Work], on_layer: LayerHook | None = None) -> list[Drawn | None]:
        if self._memory is None:
            raise ConfigError("no pool is bound")
        self.steps += 1
        for work in batch:
            if self.fail_on is not None and self.fail_on in work.tokens:
                raise RuntimeError(f"token {self.fail_on} breaks this engine")
        self.computed += sum(len(work.tokens) for work in batch)
        for layer in range(LAYERS):
            for work in batch:
                self._write(work, layer)
            if on_layer is not None:
                on_layer(layer)
        time.sleep(self.token_seconds * sum(len(work.tokens) for work in batch))
        return [self._draw(work) if work.draw else None for work in batch]

    def _at(self, work: Work, layer: int, position: int) -> npt.NDArray[np.uint8]:
        assert self._memory is not None
        block, token = divmod(position, self.geometry.block_size)
        cell: npt.NDArray[np.uint8] = self._memory[work.slots[block], layer, token]
        return cell

    def _write(self, work: Work, layer: int) -> None:
        state = self._at(work, layer, work.start - 1).tobytes() if work.start else b""
        for i, token in enumerate(work.tokens):
            state = digest(state, bytes((layer,)), int(token).to_bytes(4, "little"))
            self._at(work, layer, work.start + i)[:] = np.frombuffer(state, dtype=np.uint8)

    def _draw(self, work: Work) -> Drawn:
        assert work.draw is not None
        seen = [
            self._at(work, layer, position).tobytes()
            for layer in range(LAYERS)
            for position in range(work.start + len(work.tokens))
        ]
        draw = work.draw
        seed = f"{draw.sampling.seed} {draw.choice} {draw.position} {draw.sampling.temperature}".encode()
        return Drawn(int.from_bytes(digest(*seen, seed)[:8], "little") % self.vocabulary)
