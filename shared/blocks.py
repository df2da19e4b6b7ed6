"""Block identity: namespaces, chained keys and the byte geometry of a block (DESIGN: block identity).

Token ids are uint32 arrays everywhere; a chain of keys is one ``bytes`` object, ``KEY`` bytes a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

KEY = 16
SCHEMA = 1
PROOF_TOKENS = 1024

_SHA256 = hashlib.sha256()

Tokens = npt.NDArray[np.uint32]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that two deployments must agree on to share a block. Two that differ never do.

    ``model``, ``weights`` and ``tokenizer`` are hex fingerprints. ``layout`` names the byte order inside a
    block; ``plain`` is ``[layer][token][k|v][kv_head][head_dim]``. ``lora`` is the fingerprint of the
    adapter's content, ``salt`` the tenant's; both are set per request and are empty in a deployment's own
    namespace. ``block_bytes``: size of a block where the layout is opaque, else 0.
    """

    model: str
    weights: str
    tokenizer: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    tensor_parallel: int = 1
    layout: str = "plain"
    lora: str = ""
    salt: str = ""
    block_bytes: int = 0
    schema: int = SCHEMA

    def root(self) -> bytes:
        """The parent of every first block: sha256 over all fields, ``KEY`` bytes."""
        return hashlib.sha256(msgspec.json.encode(self)).digest()[:KEY]

    def deployment(self) -> Namespace:
        """The namespace without what varies per request: one slab, one registration."""
        return msgspec.structs.replace(self, lora="", salt="")

    def proof(self) -> bytes:
        """Chain of a fixed token vector; equal exactly when all fields and the hash code are equal."""
        tokens = np.arange(PROOF_TOKENS, dtype=np.uint32)
        return chain_keys(self.root(), tokens, self.block_size)[-KEY:] or self.root()

    def difference(self, other: Namespace) -> str:
        """Name of the first field that differs, "" when none does."""
        for name in self.__struct_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return ""

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.layers, self.block_size, self.kv_heads, self.head_dim, self.dtype, self.block_bytes)


@dataclass(frozen=True)
class Geometry:
    """Bytes of a block ``[layer][token][k|v][kv_head][head_dim]``: layers and tokens are contiguous ranges. Of an
    opaque layout (``block_bytes`` > 0) only the whole block has a size."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype]

    @property
    def layer_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def slot_bytes(self) -> int:
        return self.block_bytes or self.layers * self.layer_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the last perhaps partly."""
        return -(-tokens // self.block_size)


def pack_tokens(tokens: Any) -> bytes:
    """Token ids as packed uint32 LE for the wire."""
    return np.asarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(packed: bytes) -> Tokens:
    """Read-only uint32 array over ``packed``."""
    return np.frombuffer(packed, dtype="<u4").astype(np.uint32, copy=False)


def chain_keys(parent: bytes, tokens: Tokens, block_size: int) -> bytes:
    """Keys of the full blocks of ``tokens``, chained after ``parent`` (a root or the key before)."""
    if len(tokens) < block_size:
        return b""
    view = np.ascontiguousarray(tokens, dtype="<u4").data.cast("B")
    step, out, start = 4 * block_size, list[bytes](), _SHA256.copy
    for at in range(0, len(view) - step + 1, step):
        one = start()  # a copy of an empty one: to look sha256 up by name takes as long as to hash 128 bytes
        one.update(parent + view[at : at + step])  # in one piece: what is fed by pieces is hashed by smaller ones
        parent = one.digest()[:KEY]
        out.append(parent)
    return b"".join(out)


def split_keys(chain: bytes) -> list[bytes]:
    return [chain[at : at + KEY] for at in range(0, len(chain), KEY)]


def iter_keys(chain: bytes) -> Iterator[bytes]:
    return (chain[at : at + KEY] for at in range(0, len(chain), KEY))


def key_count(chain: bytes) -> int:
    return len(chain) // KEY
