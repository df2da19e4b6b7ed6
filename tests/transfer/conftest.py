"""A world of agents for each test, over each transport where the test asks for ``world``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest

from services.store.transfer.tls import Files
from tests.transfer.agents import World, world_of
from tests.transfer.certificates import authority


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of an agent of the mesh."""
    return authority(tmp_path_factory.mktemp("mesh")).issue("agent")


def _world(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[World]:
    if request.param == "tls":
        return world_of("require:tcp", request.getfixturevalue("tls_files"))
    return world_of(f"require:{request.param}")


@pytest.fixture(params=["tcp", "tls", "shm"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with _world(request) as world:
        yield world


@pytest.fixture(params=["tcp", "tls"])
async def tcp_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with _world(request) as world:
        yield world


@pytest.fixture(params=["tcp", "shm"])
async def plain_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with _world(request) as world:
        yield world
