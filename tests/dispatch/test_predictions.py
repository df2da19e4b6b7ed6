"""Predicted against actual: every answer shows in the metrics once, by what was predicted and what came."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from services.conductor.dispatch import metrics
from services.conductor.scheduling.decision import Decision, Prices
from shared.telemetry import REGISTRY
from tests.dispatch.fakes import FakeDecode
from tests.dispatch.world import World
from tests.scheduling.cluster import prefill_view

Play = Callable[..., None]
NAMES = ("predicted_ttft_seconds", "ttft_seconds", "ttft_prediction_ratio", "predicted_tbt_seconds", "tbt_seconds")
RATIOS = ("tbt_prediction_ratio", "step_prediction_ratio")


def counts() -> dict[str, float]:
    """Observations of each histogram."""
    names = (*NAMES, *RATIOS)
    return {name: REGISTRY.get_sample_value(f"mooncake_conductor_{name}_count") or 0.0 for name in names}


def sums(name: str) -> float:
    return REGISTRY.get_sample_value(f"mooncake_conductor_{name}_sum") or 0.0


@pytest.mark.parametrize(("tokens", "tbts"), [(12, 1), (2, 1), (1, 0)])
def test_an_answer_is_observed_once(play: Play, tokens: int, tbts: int) -> None:
    async def scenario(world: World) -> None:
        before = counts()
        await world.collect(world.generation(max_tokens=tokens))
        grown = {name: value - before[name] for name, value in counts().items()}
        assert {grown[name] for name in NAMES[:3]} == {1}
        assert {grown[name] for name in NAMES[3:]} == {tbts}

    play(scenario)


def decision(step: float, tbt: float) -> Decision:
    prices = Prices(prefill_view([0.0], [0]), np.zeros(1), np.zeros(1))
    return Decision("p0", "d0", 0, (), 0, 0.0, 0.0, 0.0, 0.1, tbt, step, prices)


def test_gaps_are_held_against_what_was_predicted() -> None:
    """The worst tenth of all gaps, and the mean of those between tokens of decode."""
    before = {name: sums(name) for name in (*NAMES, *RATIOS)}
    predicted = decision(step=0.1, tbt=0.25)
    assert metrics.last_token(predicted, [0.5, *19 * [0.2]]) == pytest.approx(0.35)
    assert metrics.last_token(predicted, []) is None
    grown = {name: sums(name) - value for name, value in before.items()}
    assert grown["predicted_tbt_seconds"] == pytest.approx(0.25)
    assert grown["tbt_seconds"] == pytest.approx(0.35)
    assert grown["tbt_prediction_ratio"] == pytest.approx(1.4)
    assert grown["step_prediction_ratio"] == pytest.approx(2.0)
    assert grown["ttft_seconds"] == 0


def test_the_worst_tenth_is_learnt_from_the_answers_before(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth token is held up, as no model says: of the first answers that is news, of the twelfth it is not."""
    monkeypatch.setattr(FakeDecode, "seconds", lambda _, index: 0.06 if index % 10 == 0 else 0.006)

    async def scenario(world: World) -> None:
        requests = [world.generation(max_tokens=41, first=i) for i in range(12)]
        for one in requests[:-1]:
            await world.collect(one)
        before = {name: sums(name) for name in RATIOS}
        await world.collect(requests[-1])
        grown = {name: sums(name) - value for name, value in before.items()}
        assert grown["tbt_prediction_ratio"] == pytest.approx(1.0, abs=0.1)
        assert world.dispatcher.mesh.ledger.decodes.tail.seconds(asyncio.get_running_loop().time()) > 0.02

    play(scenario)


def test_steps_that_are_all_slower_than_predicted_are_no_tail(play: Play) -> None:
    """The batch grew, or the machine is slow: the load reports tell that, and it must not count twice."""

    async def scenario(world: World) -> None:
        world.step_seconds = 0.08
        for i in range(8):
            await world.collect(world.generation(max_tokens=41, first=i))
        assert world.dispatcher.mesh.ledger.decodes.tail.seconds(asyncio.get_running_loop().time()) < 0.02

    play(scenario)


def test_a_client_that_reads_slowly_teaches_nothing(play: Play) -> None:
    async def scenario(world: World) -> None:
        for i in range(8):
            async for _ in world.dispatcher.generate(world.generation(max_tokens=30, first=i)):
                await asyncio.sleep(0.5)
        assert world.dispatcher.mesh.ledger.decodes.tail.seconds(asyncio.get_running_loop().time()) < 0.1

    play(scenario)
