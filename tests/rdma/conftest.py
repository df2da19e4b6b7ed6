"""A world of agents that have nothing but RDMA, in a guest whose cables are all plugged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.rdma.rig import NICS, cable
from tests.transfer.agents import World, world_of


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with world_of("require:rdma") as world:
        yield world


@pytest.fixture
def cables() -> Iterator[None]:
    """Whatever the test pulls is plugged afterwards."""
    yield
    for number in range(len(NICS)):
        cable("plug", number)
        cable("up", number)
