"""Every control message lost, repeated, late and reordered: token streams exact, and in the end nothing held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.messages import Sampling

REQUESTS = [(5, 3), (16, 1), (33, 12), (64, 20), (64, 5), (100, 30)]


async def serve_all(kit: Any, mesh: Any, pairs: list[tuple[int, int]]) -> list[Any]:
    """All requests at once (two share their prompt); every stream is what one process alone would draw."""
    asks = []
    for i, (length, count) in enumerate(REQUESTS):
        turn = pairs[i % len(pairs) :] + pairs[: i % len(pairs)]
        asks.append(mesh.gateway.run(kit.tokens(length, seed=length), kit.greedy(count), pairs=turn))
    answers = await asyncio.gather(*asks)
    for (length, count), answer in zip(REQUESTS, answers, strict=True):
        assert answer.tokens == mesh.expect(kit.tokens(length, seed=length), kit.greedy(count))
        assert answer.finish == "length"
    return answers


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_repeated_or_held(kit: Any, seed: int) -> None:
    async def main() -> None:
        faults = kit.faults(lose=0.15, duplicate=0.2, delay=0.3, longest=1.5)
        async with kit.mesh(prefills=2, decodes=2, seed=seed, faults=faults, step_s=0.01) as mesh:
            await serve_all(kit, mesh, [(0, 0), (1, 1), (0, 1), (1, 0)])
            mesh.net.faults = kit.faults()
            await mesh.quiet(6.0)

    kit.run(main())


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_retried_without_a_loss(kit: Any, seed: int) -> None:
    """Whatever the order in which messages come, and however often."""

    async def main() -> None:
        faults = kit.faults(duplicate=0.3, delay=0.6, longest=0.45)
        async with kit.mesh(prefills=1, decodes=1, seed=seed, faults=faults, step_s=0.01) as mesh:
            answers = await serve_all(kit, mesh, [(0, 0)])
            assert [(a.attempts, a.errors) for a in answers] == [(1, [])] * len(REQUESTS)
            mesh.net.faults = kit.faults()
            await mesh.quiet(6.0)

    kit.run(main())


KINDS = ["Submit", "Admit", "LandingRequest", "LandingGrant", "Start", "Ready", "TokenBatch", "Accepted", "LiveList"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 3])
def test_one_kind_of_message_is_lost(kit: Any, kind: str, times: int) -> None:
    async def main() -> None:
        async with kit.mesh(step_s=0.01) as mesh:
            left = times

            def keep(_: str, message: Any) -> bool:
                nonlocal left
                hit = type(message).__name__ == kind and left > 0
                left -= hit
                return not hit

            mesh.net.filter = keep
            tokens, sampling = kit.tokens(40), kit.greedy(10)
            answer = await mesh.gateway.run(tokens, sampling)
            assert (answer.tokens, answer.attempts) == (mesh.expect(tokens, sampling), 1)
            assert answer.usage is not None
            await mesh.quiet(6.0)

    kit.run(main())


@pytest.mark.parametrize("moment", [0.005 * i for i in range(30)])
def test_cancel_at_any_moment(kit: Any, moment: float) -> None:
    """Everything is let go of within a chunk or a step."""

    async def main() -> None:
        async with kit.mesh(step_s=0.02) as mesh:
            mesh.network.delay = 0.01
            ask = asyncio.ensure_future(mesh.gateway.run(kit.tokens(100), kit.greedy(200), name="r"))
            await asyncio.sleep(moment)
            stream = mesh.gateway.streams["r", 1]
            ask.cancel()
            await asyncio.gather(ask, return_exceptions=True)
            await mesh.gateway.cancel(stream)
            await mesh.quiet(0.2)
            again = await mesh.gateway.run(kit.tokens(100), kit.greedy(5))
            assert again.tokens == mesh.expect(kit.tokens(100), kit.greedy(5))
            await mesh.quiet()

    kit.run(main())


def test_cancel_before_submit_leaves_a_tombstone(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh() as mesh:
            held_back: list[Any] = []

            def keep(_: str, message: Any) -> bool:
                if type(message).__name__ in ("Submit", "Admit") and message.attempt == 1:
                    held_back.append(message)
                    return False
                return True

            mesh.net.filter = keep
            ask = asyncio.ensure_future(mesh.gateway.run(kit.tokens(20), kit.greedy(5), name="r"))
            await asyncio.sleep(0.1)
            stream = mesh.gateway.streams["r", 1]
            ask.cancel()
            await mesh.gateway.cancel(stream)
            await asyncio.sleep(0.1)
            mesh.net.filter = None
            for message in held_back:
                answer = await mesh.gateway.bus.request(message.target.id, message, 1.0)
                assert answer.error.code == "tombstoned"
            assert not mesh.held()

    kit.run(main())


def test_lists_lost_for_long_drop_and_the_gateway_hears_of_it(kit: Any) -> None:
    """A gateway whose lists do not come looks dead; its stream goes on with the next attempt."""

    async def main() -> None:
        async with kit.mesh(step_s=0.1) as mesh:
            until = asyncio.get_running_loop().time() + 6.0

            def keep(_: str, message: Any) -> bool:
                return type(message).__name__ != "LiveList" or asyncio.get_running_loop().time() > until

            mesh.net.filter = keep
            tokens, sampling = kit.tokens(20), kit.greedy(60)
            answer = await mesh.gateway.run(tokens, sampling)
            assert answer.tokens == mesh.expect(tokens, sampling)
            assert answer.attempts > 1 and set(answer.errors) <= {"unknown", "unknown_attempt"}
            await mesh.quiet(6.0)

    kit.run(main())


def test_dead_gateway_is_dropped_within_its_silence(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(step_s=0.05) as mesh:
            asks = [asyncio.ensure_future(mesh.gateway.run(kit.tokens(90, seed=i), kit.greedy(500))) for i in range(4)]
            await asyncio.sleep(1.0)
            assert mesh.held()
            mesh.gateway.bus.abort()
            for ask in asks:
                ask.cancel()
            mesh.gateway.streams.clear()
            await mesh.quiet(3.5)

    kit.run(main())


def test_bus_down_for_half_a_minute_costs_no_attempt(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(step_s=0.2) as mesh:
            tokens, sampling = kit.tokens(60), kit.greedy(40)
            ask = asyncio.ensure_future(mesh.gateway.run(tokens, sampling))
            await asyncio.sleep(1.5)
            mesh.net.stop()
            await asyncio.sleep(30.0)
            mesh.net.start()
            answer = await ask
            assert (answer.tokens, answer.attempts) == (mesh.expect(tokens, sampling), 1)
            await mesh.quiet(6.0)

    kit.run(main())


def test_partitioned_prefill_is_left_and_lets_go(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(prefills=2, step_s=0.05) as mesh:
            tokens, sampling = kit.tokens(100), kit.greedy(10)
            mesh.net.partition("p0")
            answer = await mesh.gateway.run(tokens, sampling, pairs=[(0, 0), (1, 0)])
            assert answer.tokens == mesh.expect(tokens, sampling)
            mesh.net.heal()
            await mesh.quiet(6.0)

    kit.run(main())


def test_stop_and_sampling_survive_faults(kit: Any) -> None:
    async def main() -> None:
        faults = kit.faults(lose=0.1, duplicate=0.2, delay=0.3, longest=1.0)
        async with kit.mesh(prefills=2, decodes=2, faults=faults, step_s=0.01) as mesh:
            tokens = kit.tokens(50)
            free = mesh.expect(tokens, kit.greedy(30))
            sampling = Sampling(max_tokens=30, seed=7, temperature=0.0, stop_ids=[free[11]])
            expected = [o.token for o in mesh.expected(tokens, sampling)]
            answer = await mesh.gateway.run(tokens, sampling, pairs=[(0, 0), (1, 1)])
            assert (answer.tokens, answer.finish) == (expected, "stop")

    kit.run(main())
