"""What the benchmarks of the index have in common: chains from a seed, cut into messages; a clock; memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shared.blocks import KEY

CHAIN = 512
"""Blocks of a chain: a prompt of 128k tokens at 256 a block."""

MESSAGE = 16

clock = time.thread_time


def random_chains(blocks: int, seed: int = 0) -> list[bytes]:
    """Chains of :data:`CHAIN` keys; equal for equal seeds."""
    rng = np.random.default_rng(seed)
    return [rng.bytes(CHAIN * KEY) for _ in range(-(-blocks // CHAIN))]


def messages(chains: Sequence[bytes], size: int = MESSAGE) -> Iterator[tuple[bytes, bytes]]:
    """(parent, keys), ``size`` keys at a time."""
    for chain in chains:
        for at in range(0, len(chain), size * KEY):
            yield chain[at - KEY : at] if at else b"", chain[at : at + size * KEY]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
