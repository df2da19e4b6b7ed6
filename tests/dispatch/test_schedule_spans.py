"""The span of a decision says what was predicted, what was allowed and who was looked at, whatever was decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from services.conductor.dispatch import placing, schedule_spans
from shared.errors import Contended, DoesNotFit
from tests.dispatch.world import World
from tests.spans import recorded

Play = Callable[..., None]
Spans = Callable[[], list[ReadableSpan]]


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """All spans of decisions so far."""
    with recorded(monkeypatch, placing, schedule_spans) as exporter:
        yield lambda: list(exporter.get_finished_spans())


def told(span: ReadableSpan) -> dict[str, Any]:
    assert span.name == "schedule"
    return {name.removeprefix("mooncake."): value for name, value in (span.attributes or {}).items()}


def candidates(span: ReadableSpan) -> list[dict[str, Any]]:
    return [dict(event.attributes or {}) for event in span.events if event.name == "candidate"]


def test_a_choice_tells_what_it_was_chosen_from(play: Play, decisions: Spans) -> None:
    async def scenario(world: World) -> None:
        await world.collect(world.generation(slo_ttft_ms=5000))
        (span,) = decisions()
        assert {one["instance"] for one in candidates(span)} == {"p0", "p1"}
        said = told(span)
        assert said["prefill"] in ("p0", "p1") and said["objective_ttft_s"] == 5.0
        assert said["predicted_ttft_s"] == pytest.approx(min(one["price_s"] for one in candidates(span)))
        assert said["predicted_tbt_s"] > 0 and span.status.status_code is StatusCode.UNSET

    play(scenario)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [({"slo_ttft_ms": 1}, "ttft"), ({"slo_tbt_ms": 1}, "tbt"), ({"max_tokens": 600, "length": 3000}, "no_room")],
)
def test_a_refusal_tells_what_it_was_refused_for(
    play: Play, decisions: Spans, wanted: dict[str, int], reason: str
) -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(1.5)  # the first reports
        world.prefill_seconds = 1.0
        busy = asyncio.ensure_future(world.collect(world.generation(first=500, length=3000)))
        await asyncio.sleep(0)
        before = len(decisions())
        with pytest.raises(Contended) as e:
            await world.collect(world.generation(**wanted))
        (span,) = decisions()[before:]
        assert e.value.field == told(span)["rejected"] == reason == span.status.description
        assert span.status.status_code is StatusCode.ERROR
        assert [one["instance"] for one in candidates(span)] and candidates(span)[0]["price_s"] > 0
        if reason != "no_room":
            assert told(span)[f"predicted_{reason}_s"] > told(span)[f"objective_{reason}_s"] == 0.001
        await busy

    play(scenario, decodes=1, expected_output=600)


def test_what_fits_nowhere_tells_what_it_would_have_taken(play: Play, decisions: Spans) -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(1.5)  # the first reports
        with pytest.raises(DoesNotFit):
            await world.collect(world.generation(length=9000, max_tokens=4))
        (span,) = decisions()
        assert told(span)["rejected"] == "does_not_fit" and len(candidates(span)) == 2

    play(scenario)


def test_a_refusal_before_any_decision_tells_the_best_that_could_be(play: Play, decisions: Spans) -> None:
    async def scenario(world: World) -> None:
        world.dispatcher.consider(100)
        assert not decisions(), "what goes on has its span when it is placed"
        with pytest.raises(Contended):
            world.dispatcher.consider(100, slo_ttft_ms=1)
        (span,) = decisions()
        said, best = told(span), candidates(span)
        assert said["rejected"] == "stage0" and said["predicted_ttft_s"] > said["objective_ttft_s"] == 0.001
        assert {one["instance"] for one in best} == {"p0", "p1"}
        assert best[0]["price_s"] == pytest.approx(said["predicted_ttft_s"])

    play(scenario)
