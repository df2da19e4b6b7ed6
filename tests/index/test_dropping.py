"""Leave to drop copies: counted among the living, never below what must be left, whoever else was allowed to."""

from __future__ import annotations

from shared.embedded import RedisServer
from shared.index import code
from shared.index.dropping import may_drop
from shared.index.publishing import IndexPublisher
from shared.redis_client import RedisLink


async def test_copies_that_may_be_dropped_do_not_count_any_more(redis_server: RedisServer) -> None:
    codes = [code(i) for i in range(1, 5)]
    keys = [bytes([i]) * 16 for i in range(40)]
    url = redis_server.url
    for n, one in enumerate(codes[:3]):
        async with IndexPublisher(url, "drops", one) as publisher:
            publisher.committed(b"", keys[: len(keys) - n])
            await publisher.flushed()
    link = RedisLink(url)
    try:

        async def ask(me: bytes, keep: int, living: list[bytes]) -> list[bool]:
            return await may_drop(link, "drops", me, keys, keep, living)

        assert await ask(codes[3], 1, codes) == [False] * 40  # has none
        assert await ask(codes[0], 3, codes) == [False] * 40
        assert await ask(codes[0], 2, codes[:2]) == [False] * 40  # the third is dead
        assert await ask(codes[0], 2, codes) == [True] * 38 + [False] * 2
        assert await ask(codes[1], 2, codes) == [False] * 40
        assert await ask(codes[1], 1, codes) == [True] * 39 + [False]
        assert await ask(codes[2], 1, codes) == [False] * 40
        assert await may_drop(link, "drops", codes[0], [], 1, codes) == []
    finally:
        await link.close()
