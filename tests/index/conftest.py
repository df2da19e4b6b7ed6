from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.embedded import RedisServer


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server
