from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.embedded import NatsServer


@pytest.fixture(scope="module")
def nats_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server
