"""Leave to drop surplus copies of blocks: given by one script, so that no two agents drop the last ones together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shared.index import SHARDS, Layout, shard_of
from shared.redis_client import Argument, Call, RedisLink
from shared.redis_scripts import load

COUNTS_MS = 10_000
"""For so long a copy that may be dropped counts as gone, although the index names it still."""


async def may_drop(
    link: RedisLink,
    mesh: str,
    code: bytes,
    keys: Sequence[bytes],
    keep: int,
    living: Collection[bytes],
    *,
    shards: int = SHARDS,
) -> list[bool]:
    """Per key, in order: may agent ``code`` drop its copy, so that ``keep`` others of ``living`` agents have one? Who
    is told yes must drop it. Raises Unavailable."""
    layout = Layout(mesh, shards)
    wanted: dict[int, list[int]] = {}
    for at, key in enumerate(keys):
        wanted.setdefault(shard_of(key, shards), []).append(at)
    head: list[Argument] = [code, keep, COUNTS_MS, len(living), *living]
    calls: list[Call] = [
        ([layout.blocks[shard], layout.drops[shard]], [*head, *(keys[at] for at in places)])
        for shard, places in wanted.items()
    ]
    out = [False] * len(keys)
    for places, answers in zip(wanted.values(), await link.run_many(load("index_drop"), calls), strict=True):
        for at, answer in zip(places, answers, strict=True):
            out[at] = answer == 1
    return out
