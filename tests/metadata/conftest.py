from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from shared.embedded import RedisServer
from shared.metadata import Metadata


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def metadata(redis_server: RedisServer) -> AsyncIterator[Metadata]:
    async with await Metadata.connect(redis_server.url, "m") as metadata:
        await metadata.link.client.flushall()
        yield metadata
