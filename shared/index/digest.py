"""Digest of a set of (key, tier): how many, and the xor of all keys, those of tier t rotated by t words."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from shared.blocks import KEY

BITS = 8 * KEY
_ALL = (1 << BITS) - 1
_STATE = struct.Struct("<QQ16s")
STATE = _STATE.size
_FEW = 64  # below, folding one long int is faster than entering numpy


class State(NamedTuple):
    """What is held by one agent in one shard after its change number ``seq``."""

    seq: int = 0
    size: int = 0
    xor: int = 0

    def pack(self) -> bytes:
        return _STATE.pack(self.seq, self.size, self.xor.to_bytes(KEY, "big"))


def unpack_state(packed: bytes) -> State:
    """What is no state says that nothing was told: whoever has told something tells it again."""
    if len(packed) < STATE:
        return State()
    seq, size, xor = _STATE.unpack_from(packed)
    return State(seq, size, int.from_bytes(xor, "big"))


def rotated(xor: int, tier: int) -> int:
    """What keys of ``tier`` whose plain xor is ``xor`` contribute (linear: a whole group may be rotated at once)."""
    shift = 32 * (tier % 4)
    return (xor << shift | xor >> (BITS - shift)) & _ALL if shift else xor


def xor_keys(keys: bytes) -> int:
    """Xor of the keys of a chain."""
    if len(keys) < _FEW * KEY:
        out, width = int.from_bytes(keys, "big"), 1 << max(len(keys) // KEY - 1, 0).bit_length()
        while width > 1:
            width //= 2
            out = out >> BITS * width ^ out & (1 << BITS * width) - 1
        return out
    words = np.frombuffer(keys, dtype=np.uint64).reshape(-1, KEY // 8)
    return int.from_bytes(np.bitwise_xor.reduce(words, axis=0).tobytes(), "big")
