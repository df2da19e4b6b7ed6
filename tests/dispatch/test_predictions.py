"""Predicted against actual: every answer shows in the metrics once, by what was predicted and what came."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.conductor.dispatch import metrics
from shared.telemetry import REGISTRY
from tests.dispatch.world import World

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


def test_gaps_are_held_against_what_was_predicted() -> None:
    """The worst tenth of all gaps, and the mean of those between tokens of decode."""
    before = {name: sums(name) for name in (*NAMES, *RATIOS)}
    metrics.last_token(0.1, [0.5, *19 * [0.2]])
    metrics.last_token(0.1, [])
    grown = {name: sums(name) - value for name, value in before.items()}
    assert grown["predicted_tbt_seconds"] == pytest.approx(0.1)
    assert grown["tbt_seconds"] == pytest.approx(0.35)
    assert grown["tbt_prediction_ratio"] == pytest.approx(3.5)
    assert grown["step_prediction_ratio"] == pytest.approx(2.0)
    assert grown["ttft_seconds"] == 0
