"""What the stress program stores: bytes that follow from key and generation, so that a torn or swapped block shows."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shared.blocks import KEY

HEAD = struct.Struct("<16sQQ")
LEAST = HEAD.size
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)

Bytes = bytes | memoryview


class Mismatch(Exception):
    """These bytes were never stored under that key."""


def key_of(space: str, number: int) -> bytes:
    return hashlib.sha256(f"{space}/{number}".encode()).digest()[:KEY]


def content(key: bytes, generation: int, most: int, whole: bool = False) -> bytes:
    """A header (key, generation, length), then words of which every one depends on key, generation and its place.
    ``most`` (at least :data:`LEAST`) bytes where ``whole``, else a length that follows from the rest."""
    seed = int.from_bytes(hashlib.sha256(key + generation.to_bytes(8, "little")).digest()[:8], "little")
    size = most if whole else LEAST + seed % (most - LEAST + 1)
    words: npt.NDArray[np.uint64] = np.arange(-(-(size - LEAST) // 8), dtype=np.uint64)
    words *= _ODD
    words += np.uint64(seed)
    words ^= words >> np.uint64(29)
    words *= _MIX
    return (HEAD.pack(key, generation, size) + words.tobytes())[:size]


def check(
    key: bytes, data: Bytes, most: int, issued: Callable[[int], bool] = lambda generation: True, whole: bool = False
) -> int:
    """The generation that these bytes are. Raises Mismatch unless all of them are one generation of ``key`` that was
    ``issued``."""
    if len(data) < LEAST:
        raise Mismatch(f"{len(data)} bytes")
    named, generation, size = HEAD.unpack_from(data)
    if named != key:
        raise Mismatch(f"the block of {named.hex()}")
    if not issued(generation):
        raise Mismatch(f"generation {generation}, which nobody has written")
    wanted = content(key, generation, most, whole)
    if size != len(data) or len(wanted) != len(data):
        raise Mismatch(f"{len(data)} bytes of {len(wanted)} (the header says {size})")
    if data != wanted:
        differ = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(wanted, np.uint8))
        raise Mismatch(f"generation {generation}: {len(differ)} bytes differ, from byte {differ[0]} to {differ[-1]}")
    return int(generation)
