"""The block index: which agent holds which block, in Redis, mirrored by the conductors.

Pure: ``entry`` (one stream entry), ``digest``, ``publisher`` (agent side), ``prefix`` (who holds how long a prefix),
``mirror`` (apply, compare, decide to resync), ``breaker`` (whom not to purge), ``twin`` (the Redis scripts in Python).
Shells: ``publishing``, ``mirroring``, ``lookup``, ``dropping``, ``sweeping``, ``sparing``.
"""

from __future__ import annotations

SHARDS = 1
"""Default number of shards. All processes of a mesh use the same. More spread the index over the servers of a Redis
Cluster, but cut every commit into as many entries: a conductor then follows several times fewer blocks a second.
"""

DRAM, SSD = 0, 1

STREAM = 1 << 16
"""Entries kept in the streams of all shards, about."""


def code(incarnation: int) -> bytes:
    """The name of an incarnation in Redis, of an agent also in the index: 8 bytes."""
    return incarnation.to_bytes(8, "big")


def shard_of(key: bytes, shards: int) -> int:
    return key[0] % shards


class Layout:
    """Names of the index's keys; those of a shard lie in one hash tag."""

    def __init__(self, mesh: str, shards: int = SHARDS) -> None:
        if not 1 <= shards <= 256:
            raise ValueError("an index has 1 to 256 shards")
        self.shards = shards
        self.kept = STREAM // shards  # entries in a stream, about
        bases = [f"mc:{{{mesh}.{shard}}}:" for shard in range(shards)]
        self.blocks = [base + "blocks" for base in bases]  # hash: key -> places
        self.stream = [base + "stream" for base in bases]  # changes
        self.taken = [base + "taken" for base in bases]  # hash: code -> State, what Redis holds of it
        self.told = [base + "told" for base in bases]  # hash: code -> State, what the agent says it holds
        self.drops = [base + "drops" for base in bases]  # sorted set: key and code that may be dropped, until when
