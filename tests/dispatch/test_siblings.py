"""Further answers to a prompt are computed where the first one was, as long as that instance takes work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.conductor.generation import Siblings
from shared.messages import Load
from tests.dispatch.fakes import expected
from tests.dispatch.world import World, ids

Play = Callable[..., None]


async def homes(world: World, siblings: Siblings | None, count: int = 6) -> set[str]:
    """The prefill instances of so many requests at once."""
    requests = [world.generation(siblings=siblings) for _ in range(count)]
    tasks = [asyncio.ensure_future(world.collect(g)) for g in requests]
    await asyncio.sleep(0.02)
    efforts = [run.effort for run in world.dispatcher.mesh.runs.values()]
    found = {effort.placement.prefill.id for effort in efforts if effort}
    assert [ids(tokens) for tokens in await asyncio.gather(*tasks)] == [expected(g) for g in requests]
    return found


def test_they_go_where_the_first_was_computed(play: Play) -> None:
    async def scenario(world: World) -> None:
        assert len(await homes(world, None)) > 1, "strangers spread"
        siblings = Siblings()
        await world.collect(world.generation(siblings=siblings))
        assert siblings.home is not None
        assert await homes(world, siblings) == {siblings.home.id}

    play(scenario, prefills=3)


def test_they_go_elsewhere_when_that_one_is_gone(play: Play) -> None:
    async def scenario(world: World) -> None:
        siblings = Siblings()
        await world.collect(world.generation(siblings=siblings))
        home = siblings.home
        assert home is not None
        world.fakes[home.id].kill()
        g = world.generation(siblings=siblings)
        assert ids(await world.collect(g)) == expected(g)
        assert siblings.home is not None and siblings.home != home

    play(scenario, prefills=3)


def test_they_go_elsewhere_when_its_queue_is_too_long(play: Play) -> None:
    async def scenario(world: World) -> None:
        siblings = Siblings()
        await world.collect(world.generation(siblings=siblings))
        home = siblings.home
        assert home is not None
        mesh = world.dispatcher.mesh
        mesh.ledger.report(home.id, Load(queue_ms=10.0 * mesh.settings.slo_ttft_ms), asyncio.get_running_loop().time())
        assert home.id not in await homes(world, siblings, 2)

    play(scenario, prefills=3)
