"""A request with several choices is accepted or refused as a whole: what a refusal of one of them does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from services.conductor.gateway import generations
from services.conductor.generation import Generation
from shared.errors import BusDown, Contended, MooncakeError, Unavailable
from tests.gateway.fakes import Api, Script

Which = Callable[[Generation], bool]

LONG = list(range(3, 43))  # token ids with two full blocks
REFUSALS = [Contended("full", retry_after_ms=1), Unavailable("no_prefill", retry_after_ms=1), BusDown("down")]


def refusing(
    seen: list[Generation], which: Callable[[Generation], bool], error: MooncakeError
) -> Callable[..., Script]:
    """The first two that are ``which`` are refused."""

    def script(generation: Generation) -> Script:
        if which(generation) and len(seen) < 2:
            seen.append(generation)
            return Script([], error=error)
        return Script([5])

    return script


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.code)
async def test_a_refused_choice_comes_again_as_a_new_request(api: Api, error: MooncakeError) -> None:
    """Under its old id instances would refuse it for good, and what it waited would be held against its objective."""
    refused: list[Generation] = []
    began = time.monotonic()
    api.dispatcher.scripts = refusing(refused, lambda one: one.sampling.seed != 1, error)
    status, answer, _ = await api.complete(prompt=LONG, n=2, seed=1)
    assert (status, len(answer["choices"])) == (200, 2)
    tries = [one for one in api.dispatcher.asked if one.sampling.seed != 1]
    assert len({one.id for one in api.dispatcher.asked}) == len(api.dispatcher.asked) == 4
    assert began < tries[0].arrived < tries[1].arrived < tries[2].arrived


async def test_the_wait_for_the_first_choice_is_not_held_against_the_others(api: Api) -> None:
    api.dispatcher.script = Script([5], delay=0.2)
    await api.complete(prompt=LONG, n=2)
    first, second = api.dispatcher.asked
    assert second.arrived - first.arrived >= 0.2


async def test_further_prompts_of_a_batch_wait_for_room(api: Api) -> None:
    """Else a batch that is more than the mesh takes at once would be refused for ever, on an idle mesh, too."""
    refused: list[Generation] = []
    api.dispatcher.scripts = refusing(refused, lambda one: len(one.tokens) == 2, REFUSALS[0])
    status, answer, _ = await api.complete(prompt=[[5], [6, 7], [8]])
    assert (status, len(answer["choices"]), len(refused)) == (200, 3, 2)


async def test_the_first_choice_is_refused_for_all(api: Api) -> None:
    def scripts(generation: Generation) -> Script:
        return Script([5], delay=0.01) if len(generation.tokens) > 1 else Script([], error=REFUSALS[0])

    api.dispatcher.scripts = scripts
    status, answer, headers = await api.complete(prompt=[[5], [6, 7]])
    assert (status, answer["error"]["code"], headers["Retry-After-Ms"]) == (429, "contended", "1")


async def test_patience_ends_when_nothing_of_the_request_moves(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "PATIENCE", 0.3)
    lone = Script([5] * 8, delay=0.1)
    api.dispatcher.scripts = lambda one: lone if len(one.tokens) == 1 else Script([], error=REFUSALS[0])
    began = time.monotonic()
    status, answer, _ = await api.complete(prompt=[[5], [6, 7]])
    assert (status, answer["error"]["code"]) == (429, "contended")
    assert time.monotonic() - began >= 1.0  # while the first went on, the other was patient


async def test_a_retry_is_known_by_its_tickets_and_each_choice_has_one_of_its_own(api: Api) -> None:
    """By which a place in the virtual queue is kept: siblings must not take each other's, nor strangers theirs."""

    async def tickets(**body: Any) -> list[int]:
        api.dispatcher.asked.clear()
        status, _, _ = await api.complete(**body)
        assert status == 200
        first, *others = [one.ticket for one in api.dispatcher.asked]
        return [first, *sorted(others)]

    first = await tickets(prompt=LONG, n=3, seed=1)
    assert len(set(first)) == 3 and 0 not in first
    assert await tickets(prompt=LONG, n=3, seed=1) == first
    assert set(api.dispatcher.considered) == {first[0]}, "the request is judged as its first choice"
    others = await tickets(prompt=LONG, n=3, seed=2) + await tickets(prompt=LONG[:-1], n=3, seed=1)
    assert len(set(others)) == 6 and not set(others) & set(first)
