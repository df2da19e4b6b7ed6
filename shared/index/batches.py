"""Cutting the agent's changes into batches whose keys have positions (see shared/index/entry.py)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shared.index.digest import State
from shared.index.entry import ADD, DELETE, MOST_KEYS, NO_PARENT, Entry, pack_heads

MOST_BATCH = 2048  # keys


@dataclass(slots=True)
class Change:
    """``old`` and ``new``: tier before and after, -1 for not held. ``parent``: as in Publisher.committed. ``number``
    counts an agent's changes."""

    key: bytes
    parent: bytes | None
    old: int
    new: int
    number: int
    position: int = 0
    head: bool = False
    batch: int = 0
    total: int = 0

    def entry(self, code: bytes, state: State, changes: Sequence[Change]) -> Entry:
        """The entry of ``changes``, which are of this one's batch."""
        heads = [(index, change.parent or NO_PARENT) for index, change in enumerate(changes) if change.head]
        return Entry(
            ADD if self.new >= 0 else DELETE,
            code,
            state,
            b"".join(change.key for change in changes),
            max(self.new, 0),
            0,
            self.batch,
            self.total,
            struct.pack(f"<{len(changes)}H", *(change.position for change in changes)),
            pack_heads(heads),
        )


def most_batch(shards: int) -> int:
    """Keys of a batch: with one shard a batch is one entry, which says itself what it follows; with more its entries
    are as full as the batch is large."""
    return min(MOST_KEYS * shards, MOST_BATCH)


def cut(changes: Iterable[Change], most: int = MOST_BATCH) -> Iterator[list[Change]]:
    """Batches in order: changes to one tier, at most ``most``, each with its position.

    Consecutive positions are consecutive blocks. A head's parent is named; where the parent is not known, a position
    is left out instead.
    """
    batch: list[Change] = []
    position = 0
    for change in changes:
        if batch and (change.new != batch[0].new or len(batch) == most):
            yield batch
            batch, position = [], 0
        follows = bool(batch) and change.parent is not None and change.parent == batch[-1].key
        change.head = change.new >= 0 and change.parent is not None and not follows
        position += 2 if batch and not follows and not change.head else 1
        change.position = position
        batch.append(change)
    if batch:
        yield batch
