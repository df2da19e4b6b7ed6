"""What a step computes, as index tensors: built once, shared by all layers of the model.

A batch is flattened into one row of tokens. Work items of one token are *rows*: all of them attend in one batched
call per group of similar length. Longer ones are *chunks*, attended one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from shared.engines.base import Work
from shared.errors import InvalidInput

SPLIT_BLOCKS = 8  # rows whose padded length is at most this stay in one group, whatever their lengths


@dataclass(frozen=True)
class Chunk:
    """Tokens [first, last) of the flattened batch attend to positions [low, last position] of their sequence.

    ``slots`` are the blocks from position ``low`` on (a multiple of the block size), ``mask`` is additive
    ``[1][1][n][keys]``; both None for a whole prompt without window, which needs nothing but itself.
    """

    first: int
    last: int
    keys: int = 0
    slots: Tensor | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Single-token items of similar length, [first, last) in the order of :class:`View`: ``slots`` flat
    ``[rows * blocks]``, additive ``mask`` ``[rows][1][1][blocks * B]`` and, flat, the gathered token positions
    ``unused`` whose bytes are nobody's and must not reach the arithmetic (they may be NaN)."""

    first: int
    last: int
    slots: Tensor
    mask: Tensor | None
    unused: Tensor | None


@dataclass(frozen=True)
class View:
    """Chunks and row groups under one attention window (0: none). ``order``: where the rows are among the flattened
    tokens; None when they are all tokens, in order."""

    chunks: list[Chunk]
    rows: list[Rows]
    order: Tensor | None


@dataclass(frozen=True)
class _Item:
    first: int
    count: int
    start: int
    slots: Sequence[int]

    @property
    def keys(self) -> int:
        return self.start + self.count


class Plan:
    """One step over ``batch``. ``limit``: positions that a sequence may have; ``vocabulary``: token ids are below it.
    ``together``: blocks that a group of rows may gather at once. Raises InvalidInput for work that is empty, too
    long, lacks slots or has unknown tokens."""

    def __init__(
        self,
        batch: Sequence[Work],
        block_size: int,
        limit: int,
        vocabulary: int,
        dtype: torch.dtype,
        together: int = 1 << 30,
    ) -> None:
        self.block_size = block_size
        self._together = together
        self.dtype = dtype
        self._views: dict[int, View] = {}
        self._items: list[_Item] = []
        at = 0
        for i, work in enumerate(batch):
            _check(work, i, block_size, limit)
            self._items.append(_Item(at, len(work.tokens), work.start, work.slots))
            at += len(work.tokens)
        self.count = at
        tokens = np.concatenate([work.tokens for work in batch]).astype(np.int64)
        if tokens.max() >= vocabulary:
            raise InvalidInput(f"token {tokens.max()} is not in the vocabulary of {vocabulary}", field="tokens")
        positions = np.concatenate([np.arange(i.start, i.keys) for i in self._items])
        places = np.concatenate([np.asarray(i.slots)[np.arange(i.start, i.keys) // block_size] for i in self._items])
        self.tokens = torch.from_numpy(tokens)[None]
        self.positions = torch.from_numpy(positions)[None]
        self.slots = torch.from_numpy(places.astype(np.int64))
        self.offsets = torch.from_numpy(positions % block_size)
        draws = [i.first + i.count - 1 for i, work in zip(self._items, batch, strict=True) if work.draw is not None]
        self.drawing = torch.tensor(draws, dtype=torch.long)

    def view(self, window: int = 0) -> View:
        """The attention of this step when a query sees the last ``window`` positions only (0: all)."""
        if window not in self._views:
            chunks = [self._chunk(i, window) for i in self._items if i.count > 1]
            groups = _groups([i for i in self._items if i.count == 1], self.block_size, window, self._together)
            order = [item.first for group in groups for item in group]
            self._views[window] = View(
                chunks,
                [self._rows(group, first, window) for group, first in zip(groups, _firsts(groups), strict=True)],
                None if order == list(range(self.count)) else torch.tensor(order, dtype=torch.long),
            )
        return self._views[window]

    def _chunk(self, item: _Item, window: int) -> Chunk:
        first, last = item.first, item.first + item.count
        windowed = 0 < window < item.keys
        if item.start == 0 and not windowed:
            return Chunk(first, last)
        low = _low_block(item.start, window, self.block_size)
        base = low * self.block_size
        slots = torch.tensor(item.slots[low : _blocks(item.keys, self.block_size)], dtype=torch.long)
        query = torch.arange(item.start, item.keys)[:, None]
        key = torch.arange(base, item.keys)[None]
        seen = key <= query
        if windowed:
            seen &= key > query - window
        return Chunk(first, last, item.keys - base, slots, self._additive(seen)[None, None])

    def _rows(self, group: list[_Item], first: int, window: int) -> Rows:
        size = self.block_size
        tables = [i.slots[_low_block(i.start, window, size) : _blocks(i.keys, size)] for i in group]
        width = max(len(table) for table in tables)
        # padding repeats an own slot; its bytes are wiped from the copy by ``unused``
        slots = torch.tensor([[*table, *[table[-1]] * (width - len(table))] for table in tables], dtype=torch.long)
        base = torch.tensor([_low_block(i.start, window, size) * size for i in group])[:, None]
        position = torch.arange(width * size)[None] + base
        keys = torch.tensor([i.keys for i in group])[:, None]
        seen = position < keys
        unused = (~seen).flatten().nonzero().flatten()
        if window:
            seen &= position >= keys - window
        return Rows(
            first=first,
            last=first + len(group),
            slots=slots.flatten(),
            mask=None if bool(seen.all()) else self._additive(seen)[:, None, None],
            unused=unused if len(unused) else None,
        )

    def _additive(self, seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))


def _check(work: Work, number: int, block_size: int, limit: int) -> None:
    end = work.start + len(work.tokens)
    if len(work.tokens) == 0 or work.start < 0:
        raise InvalidInput(f"work item {number} has no tokens", field="tokens")
    if end > limit:
        raise InvalidInput(f"work item {number} ends at position {end}, the context has {limit}", field="tokens")
    if _blocks(end, block_size) > len(work.slots):
        raise InvalidInput(f"work item {number} needs {_blocks(end, block_size)} slots", field="slots")


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _low_block(position: int, window: int, block_size: int) -> int:
    """First block that a query at ``position`` can see."""
    return max(0, position + 1 - window) // block_size if window else 0


def _groups(items: list[_Item], block_size: int, window: int, together: int) -> list[list[_Item]]:
    """Rows of similar length together: padding to the longest would make short ones pay for it. No more of them than
    gather ``together`` blocks."""

    def length(item: _Item) -> int:
        return _blocks(item.keys, block_size) - _low_block(item.start, window, block_size)

    groups: list[list[_Item]] = []
    for item in sorted(items, key=length, reverse=True):
        widest = length(groups[-1][0]) if groups else 0
        fits = groups and (len(groups[-1]) + 1) * widest <= together
        if fits and (widest <= SPLIT_BLOCKS or 2 * length(item) >= widest):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _firsts(groups: list[list[_Item]]) -> list[int]:
    """Where each group begins among the rows of all."""
    return [0, *accumulate(len(group) for group in groups)][: len(groups)]
