"""Who has these blocks, asked of Redis itself: for those who do not mirror the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.index import SHARDS, Layout, shard_of
from shared.index.digest import unpack_state
from shared.index.scan import PLACE
from shared.redis_client import Argument, RedisLink


async def lookup(link: RedisLink, mesh: str, keys: Sequence[bytes], *, shards: int = SHARDS) -> list[dict[bytes, int]]:
    """Per key, in order: agent code -> tier. One HMGET per shard, all in one round trip. Incarnations that died lately
    may be among them: the caller knows who lives. Raises Unavailable."""
    layout = Layout(mesh, shards)
    wanted: dict[int, list[int]] = {}
    for at, key in enumerate(keys):
        wanted.setdefault(shard_of(key, shards), []).append(at)
    commands: list[Sequence[Argument]] = [
        ("HMGET", layout.blocks[shard], *(keys[at] for at in places)) for shard, places in wanted.items()
    ]
    out: list[dict[bytes, int]] = [{} for _ in keys]
    for places, answers in zip(wanted.values(), await link.commands(commands), strict=True):
        for at, packed in zip(places, answers, strict=True):
            if packed:
                out[at] = unpack_places(packed)
    return out


async def census(link: RedisLink, mesh: str, *, shards: int = SHARDS) -> dict[bytes, int]:
    """Agent code -> blocks that Redis has of it, at any tier, dead incarnations too. Raises Unavailable."""
    layout = Layout(mesh, shards)
    found: dict[bytes, int] = {}
    for flat in await link.commands([("HGETALL", taken) for taken in layout.taken]):
        for code, state in _items(flat):
            found[code] = found.get(code, 0) + unpack_state(state).size
    return found


def _items(answer: Any) -> list[tuple[bytes, bytes]]:
    """The client answers a hash as a map or as a flat list, by protocol version."""
    return list(answer.items()) if isinstance(answer, dict) else list(zip(answer[::2], answer[1::2], strict=True))


def unpack_places(packed: bytes) -> dict[bytes, int]:
    """Code -> tier out of a value of the hash."""
    return {packed[at : at + PLACE - 1]: packed[at + PLACE - 1] for at in range(0, len(packed) - PLACE + 1, PLACE)}
