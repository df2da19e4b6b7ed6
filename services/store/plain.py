"""Namespaces of programs that keep plain bytes in the store, without a model."""

from __future__ import annotations

import hashlib

from shared.blocks import ITEMSIZE, Namespace
from shared.errors import InvalidInput

LAYOUT = "bytes"
TOKENS = 16
DTYPE = "float32"
UNIT = 2 * TOKENS * ITEMSIZE[DTYPE]
"""Slots of plain bytes are multiples of this."""

MOST = UNIT << 19
"""The largest slot: 64 MiB."""


def plain_namespace(name: str, block_bytes: int) -> Namespace:
    """Objects of 1 to ``block_bytes`` bytes under keys of 16. Programs that give the same name and size share them;
    no model ever does. Raises InvalidInput."""
    if not 0 < block_bytes <= MOST:
        raise InvalidInput(f"block_bytes is 1 to {MOST}, not {block_bytes}", field="block_bytes")
    return Namespace(
        model=hashlib.sha256(name.encode()).hexdigest(),
        weights=f"{block_bytes:x}",
        tokenizer="",
        dtype=DTYPE,
        layers=1,
        kv_heads=1,
        head_dim=-(-block_bytes // UNIT),
        block_size=TOKENS,
        layout=LAYOUT,
    )
