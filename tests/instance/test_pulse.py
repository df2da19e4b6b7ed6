"""A silent agent is suspected, then given up; an engine that was stopped itself blames nobody."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from shared.engines.base import KVStore
from shared.errors import DeadlineExceeded
from shared.instance.pulse import DEAD_S, SUSPECT_S, Pulse


class Agent:
    """Answers when ``going``, else never, or with an error when ``failing``."""

    def __init__(self) -> None:
        self.going, self.failing, self.asked = asyncio.Event(), False, 0
        self.going.set()

    async def contains(self, keys: list[bytes]) -> list[bool]:
        self.asked += 1
        if self.failing:
            raise DeadlineExceeded("no answer")
        await self.going.wait()
        return []


async def look(pulse: Pulse, agent: Agent, start: float, seconds: float, step: float = 0.1) -> float:
    now = start
    while now < start + seconds:
        now += step
        pulse.look(cast(KVStore, agent), now)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    return now


async def test_an_agent_that_answers_is_asked_once_an_interval() -> None:
    pulse, agent = Pulse(), Agent()
    await look(pulse, agent, 0, 20)
    assert pulse.silence < 1.5
    assert 19 <= agent.asked <= 21


@pytest.mark.parametrize("failing", [False, True])
async def test_a_silent_agent_is_suspected_then_dead_then_alive_again(failing: bool) -> None:
    pulse, agent = Pulse(), Agent()
    now = await look(pulse, agent, 0, 5)
    agent.going.clear()
    agent.failing = failing
    now = await look(pulse, agent, now, SUSPECT_S - 1)
    assert pulse.silence <= SUSPECT_S
    now = await look(pulse, agent, now, 2.5)
    assert SUSPECT_S < pulse.silence <= DEAD_S
    now = await look(pulse, agent, now, DEAD_S - SUSPECT_S)
    assert pulse.silence > DEAD_S
    agent.going.set()
    agent.failing = False
    await look(pulse, agent, now, 1.5)
    assert pulse.silence <= SUSPECT_S
    pulse.close()


async def test_who_was_stopped_itself_blames_nobody() -> None:
    pulse, agent = Pulse(), Agent()
    now = await look(pulse, agent, 0, 5)
    agent.going.clear()
    now = await look(pulse, agent, now, 1.1)
    pulse.look(cast(KVStore, agent), now + 600)
    assert pulse.silence <= SUSPECT_S
    pulse.close()


async def test_another_agent_starts_with_a_clean_sheet() -> None:
    pulse, first, second = Pulse(), Agent(), Agent()
    first.going.clear()
    now = await look(pulse, first, 0, DEAD_S + 3)
    assert pulse.silence > DEAD_S
    await look(pulse, second, now, 0.1)
    assert pulse.silence <= SUSPECT_S
    pulse.close()
