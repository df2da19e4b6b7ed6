"""A world of agents for each test, over each transport where the test asks for ``world``."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings

from tests.transfer.agents import World, world_of

settings.register_profile("untimed", deadline=None)  # a timing is never a test
settings.load_profile("untimed")


@pytest.fixture(params=["require:tcp", "require:shm"], ids=["tcp", "shm"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with world_of(request.param) as world:
        yield world


@pytest.fixture
async def tcp_world() -> AsyncIterator[World]:
    async with world_of("require:tcp") as world:
        yield world
