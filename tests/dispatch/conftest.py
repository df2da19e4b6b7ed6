"""Scenarios in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared.memory_bus import Faults
from shared.virtual_loop import run as run_virtually
from tests.dispatch.world import NO_FAULTS, World

Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture
def play() -> Callable[..., None]:
    """``play(scenario, seed=, faults=, prefills=, decodes=, **settings)``: a scenario in virtual time, ended by the
    check that nothing is held anywhere."""

    def play(
        scenario: Scenario,
        seed: int = 0,
        faults: Faults = NO_FAULTS,
        prefills: int = 2,
        decodes: int = 2,
        matcher: Any = None,
        **settings: Any,
    ) -> None:
        async def main() -> None:
            world = await World(seed, faults, **settings).open(prefills, decodes, matcher)
            try:
                await scenario(world)
                world.network.faults = Faults()
                await world.settle()
                assert world.nothing_held()
            finally:
                await world.close()

        run_virtually(main())

    return play
