"""One entry of a shard's stream: a change of one agent, up to 128 keys of that shard. The script reads it as it is.

An agent's commits are consecutive chains, but a chain's keys lie in all shards. So a *batch* of keys is cut into
entries, at most a few per shard, and each key keeps its position in the batch: position + 1 follows it in the chain,
unless it is a *head*, which names its parent. A mirror puts batches together again; a gap only costs it time.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from shared.blocks import KEY
from shared.errors import ProtocolError
from shared.index.digest import State

VERSION = 1
MOST_KEYS = 128

ADD = 1  # keys are held now, at ``tier``
DELETE = 2  # keys are not held any more
BEGIN = 3  # rule: republish_replaces: all of the agent's keys of the shard follow, until END
END = 4
SWEPT = 5  # the incarnation is dead and has no entries any more

REPUBLISH = 1  # flag: between BEGIN and END; ``state`` is not that of the hash yet
FORCE = 2  # flag of END: the agent has read what the hash holds, and ``state`` is right

HEAD_FORMAT = struct.Struct("<BBBBHH8sQQ16sIHH")
HEAD = HEAD_FORMAT.size
CODE, SEQ = 8, 16  # where they are: what comes before the sequence number says what kind of entry it is, and whose
NO_PARENT = bytes(KEY)


class Entry(NamedTuple):
    """``state``: the agent's after this change. ``positions``: uint16 LE per key. ``heads``: per head uint16 LE index
    among ``keys``, then the parents. ``total``: keys of the whole batch."""

    op: int
    code: bytes
    state: State
    keys: bytes = b""
    tier: int = 0
    flags: int = 0
    batch: int = 0
    total: int = 0
    positions: bytes = b""
    heads: bytes = b""


def pack(entry: Entry) -> bytes:
    head = HEAD_FORMAT.pack(
        VERSION,
        entry.op,
        entry.tier,
        entry.flags,
        len(entry.keys) // KEY,
        len(entry.heads) // (2 + KEY),
        entry.code,
        entry.state.seq,
        entry.state.size,
        entry.state.xor.to_bytes(KEY, "big"),
        entry.batch,
        entry.total,
        0,
    )
    return head + entry.keys + entry.positions + entry.heads


def swept(code: bytes) -> bytes:
    """The packed entry that says an incarnation is dead and has been swept."""
    return pack(Entry(SWEPT, code, State()))


def unpack(payload: bytes) -> Entry:
    """Raises ProtocolError for what is no entry of this version."""
    try:
        version, op, tier, flags, n, h, code, seq, count, xor, batch, total, _ = HEAD_FORMAT.unpack_from(payload)
    except struct.error as e:
        raise ProtocolError(f"not an index entry: {len(payload)} bytes") from e
    keys = HEAD + n * KEY
    positions = keys + 2 * n
    if version != VERSION or len(payload) != positions + h * (2 + KEY):
        raise ProtocolError(f"not an index entry of version {VERSION}")
    state = State(seq, count, int.from_bytes(xor, "big"))
    return Entry(
        op, code, state, payload[HEAD:keys], tier, flags, batch, total, payload[keys:positions], payload[positions:]
    )


def pack_heads(heads: Sequence[tuple[int, bytes]]) -> bytes:
    """``heads``: (index among the entry's keys, parent; NO_PARENT for the first block of a chain)."""
    return struct.pack(f"<{len(heads)}H", *(index for index, _ in heads)) + b"".join(parent for _, parent in heads)


def unpack_heads(packed: bytes) -> list[tuple[int, bytes]]:
    n = len(packed) // (2 + KEY)
    return [
        (index, packed[2 * n + i * KEY : 2 * n + i * KEY + KEY])
        for i, index in enumerate(struct.unpack_from(f"<{n}H", packed))
    ]
