"""A load of prefixes for indexes of any make, from a seed: standard library only, for peers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

DOCUMENTS, LENGTH, TRUNK, CHUNK = 16, 2048, 32, 16
"""Documents share their first :data:`TRUNK` blocks. Blocks are stored :data:`CHUNK` at a time."""

BLOCKS = 500_000
"""Worker-blocks in all, about, as far as every worker can have one document."""

HOLES = 0.3
"""Share of the prefixes that lack a block somewhere inside."""


@dataclass(frozen=True)
class Prefixes:
    """``documents``: numbers of 63 bits, one a block. ``held``: per worker (document, blocks from its start, index of
    the block that is missing or -1)."""

    documents: list[list[int]]
    held: list[list[tuple[int, int, int]]]

    def stores(self) -> Iterator[tuple[int, int | None, list[int]]]:
        """(worker, block before or None, blocks) in the order in which agents would say it."""
        for worker, prefixes in enumerate(self.held):
            for document, length, _ in prefixes:
                blocks = self.documents[document]
                for at in range(0, length, CHUNK):
                    yield worker, blocks[at - 1] if at else None, blocks[at : min(at + CHUNK, length)]

    def removals(self) -> Iterator[tuple[int, int]]:
        """(worker, block)."""
        for worker, prefixes in enumerate(self.held):
            for document, _, hole in prefixes:
                if hole >= 0:
                    yield worker, self.documents[document][hole]


def prefixes(workers: int, seed: int = 1) -> Prefixes:
    rng = random.Random(seed)
    trunk = [rng.getrandbits(63) for _ in range(TRUNK)]
    documents = [trunk + [rng.getrandbits(63) for _ in range(LENGTH - TRUNK)] for _ in range(DOCUMENTS)]
    each = max(1, min(DOCUMENTS, BLOCKS // (workers * 1150)))
    held: list[list[tuple[int, int, int]]] = []
    for _ in range(workers):
        its: list[tuple[int, int, int]] = []
        for document in rng.sample(range(DOCUMENTS), each):
            length = rng.randrange(LENGTH // 8, LENGTH)
            its.append((document, length, rng.randrange(TRUNK, length) if rng.random() < HOLES else -1))
        held.append(its)
    return Prefixes(documents, held)
