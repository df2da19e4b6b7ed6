"""Random schedules of messages and deaths against the models' invariants, on the real objects, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.engines.base import Kind
from tests.examples import examples

RULES = settings(
    max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def watch(service: Any) -> list[tuple[str, int]]:
    """Keys in the order in which they were taken in: none may ever be there twice."""
    taken: list[tuple[str, int]] = []
    launch = service.launch

    def watched(job: Any) -> None:
        assert job.key not in taken, f"{job.key} came back"
        taken.append(job.key)
        launch(job)

    service.launch = watched
    return taken


@given(
    seed=st.integers(0, 2**32),
    lose=st.sampled_from([0.0, 0.1, 0.3]),
    duplicate=st.sampled_from([0.0, 0.3]),
    delay=st.sampled_from([0.0, 0.5]),
    cut=st.lists(st.tuples(st.sampled_from(["p0", "d0"]), st.floats(0, 3), st.floats(0.1, 5)), max_size=2),
)
@RULES
def test_streams_are_exact_and_everything_ends(
    kit: Any, seed: int, lose: float, duplicate: float, delay: float, cut: list[tuple[str, float, float]]
) -> None:
    """Tokens exact, no attempt comes back, nothing held in the end; without a fault nothing is retried."""

    async def main() -> None:
        faults = kit.faults(lose=lose, duplicate=duplicate, delay=delay, longest=0.45 if not lose else 4.0)
        async with kit.mesh(prefills=2, decodes=2, seed=seed, faults=faults, step_s=0.02) as mesh:
            for service in [*mesh.prefills, *mesh.decodes]:
                watch(service)
            loop = asyncio.get_running_loop()
            for name, at, long in cut:
                loop.call_later(at, mesh.net.partition, name)
                loop.call_later(at + long, mesh.net.heal, name)
            work = [(kit.tokens(30, seed=1), kit.greedy(20)), (kit.tokens(30, seed=1), kit.greedy(1))]
            asks = [mesh.gateway.run(t, s, pairs=[(0, 0), (1, 1)]) for t, s in work]
            for (tokens, sampling), answer in zip(work, await asyncio.gather(*asks), strict=True):
                assert answer.tokens == mesh.expect(tokens, sampling)
                assert answer.attempts == 1 or lose or cut
            mesh.net.faults = kit.faults()
            mesh.net.heal()
            await asyncio.sleep(8.0)  # the last partition is over too
            mesh.net.heal()
            await mesh.quiet(6.0)

    kit.run(main())


@given(order=st.permutations(["admit", "landing", "start", "cancel"]), repeats=st.lists(st.integers(0, 3), max_size=6))
@RULES
def test_decode_takes_messages_in_any_order(kit: Any, order: list[str], repeats: list[int]) -> None:
    """Played by hand, each perhaps repeated: once cancelled, nothing of it is ever held again."""

    async def main() -> None:
        async with kit.mesh(prefills=0) as mesh:
            decode, p = mesh.decodes[0], kit.peer("p", mesh)
            stream = p.stream(decode.ref)
            cancelled = False
            for step in [*order, *(order[i] for i in repeats)]:
                answer = await p.say(step, stream, kit.tokens(20))
                cancelled |= step == "cancel"
                if cancelled:
                    await asyncio.sleep(0.01)
                    assert not mesh.held()
                    if step in ("admit", "landing"):
                        assert answer.error.code == "tombstoned"
                    if step == "start":
                        assert answer.complete

    kit.run(main())


@pytest.mark.parametrize("first", ["start", "landing", "admit"])
def test_end_with_the_first_token_in_any_order(kit: Any, first: str) -> None:
    async def main() -> None:
        async with kit.mesh(prefills=0) as mesh:
            decode, p = mesh.decodes[0], kit.peer("p", mesh)
            stream = p.stream(decode.ref)
            if first != "start":
                await p.say(first, stream, kit.tokens(20))
            answer = await p.say("end", stream, kit.tokens(20))
            assert answer.complete
            await asyncio.sleep(0.01)
            assert not mesh.held()
            assert type(await p.say("admit", stream, kit.tokens(20))).__name__ == "Accepted"
            assert not mesh.held()
            assert decode.outputs.since((stream.request, 1), 0)[1][0].finish == "stop"

    kit.run(main())


def test_landing_requests_do_not_pile_up_while_there_is_no_room(kit: Any) -> None:
    """Prefill asks once a second; what it has stopped listening for must not keep a handler, or lists would wait."""

    async def main() -> None:
        async with kit.mesh(prefills=0) as mesh:
            decode, node, p = mesh.decodes[0], mesh.nodes[0], kit.peer("p", mesh)
            stream = p.stream(decode.ref)
            full = [node.hold(slot, Kind.NEW) for slot in node.take(mesh.slots)]
            asks = [asyncio.ensure_future(p.say("landing", stream, kit.tokens(20))) for _ in range(10)]
            await asyncio.sleep(1.5)
            assert not decode.bus._tasks and not any(ask.done() for ask in asks)
            for held in full:
                node.let_go(held)
            answer = await p.say("landing", stream, kit.tokens(20))
            assert type(answer).__name__ == "LandingGrant"
            await asyncio.gather(*asks, return_exceptions=True)

    kit.run(main())
