"""A reader that falls behind: the conductor keeps a bounded part of the answer, the instance the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.conductor.dispatch.run import BACKLOG
from tests.dispatch.fakes import expected
from tests.dispatch.world import World, ids

Play = Callable[..., None]
TOKENS = 4 * BACKLOG


def test_what_waits_for_a_slow_reader_is_bounded_and_nothing_is_lost(play: Play) -> None:
    async def scenario(world: World) -> None:
        world.step_seconds = 0.005
        wanted = world.generation(max_tokens=TOKENS)
        stream = world.dispatcher.generate(wanted)
        tokens = [await anext(stream)]
        (run,) = world.dispatcher.mesh.runs.values()
        await asyncio.sleep(TOKENS * world.step_seconds + 5)
        assert BACKLOG <= len(run.inbox) <= BACKLOG + 16  # events of other kinds are few, and never left behind
        tokens += [token async for token in stream]
        assert ids(tokens) == expected(wanted)
        assert [token.output.index for token in tokens] == list(range(TOKENS))
        assert world.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario)
