"""Prefill and decode together over the twins: tokens equal to a single process, whatever was cached where."""

from __future__ import annotations

from typing import Any

import pytest

from shared.messages import Source


@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 31, 32, 33, 100])
def test_cold_and_warm_at_block_boundaries(kit: Any, length: int) -> None:
    async def main() -> None:
        async with kit.mesh() as mesh:
            tokens, sampling = kit.tokens(length), kit.greedy(8)
            expected = mesh.expect(tokens, sampling)
            cold = await mesh.gateway.run(tokens, sampling)
            assert (cold.tokens, cold.finish, cold.attempts) == (expected, "length", 1)
            assert cold.usage and cold.usage.cached_tokens == 0
            before = mesh.engines[0].computed
            warm = await mesh.gateway.run(tokens, sampling)
            assert (warm.tokens, warm.attempts) == (expected, 1)
            cached = min(length // kit.block * kit.block, length - 1)
            assert warm.usage and warm.usage.cached_tokens == cached
            assert mesh.engines[0].computed - before == length - cached >= 1
            await mesh.quiet()

    kit.run(main())


@pytest.mark.parametrize(("warm", "expected"), [(True, 6), (True, 0), (False, 6), (False, 99)])
def test_who_accepts_a_prompt_reports_what_is_expected_to_be_computed(kit: Any, warm: bool, expected: int) -> None:
    """What is not cached is only known later, and by then the report has been read. Whatever was expected, what is
    there is what counts for the answer, and nothing is left of it."""

    async def main() -> None:
        async with kit.mesh() as mesh:
            tokens, sampling = kit.tokens(100), kit.greedy(8)
            if warm:
                await mesh.gateway.run(tokens, sampling)
            answer = await mesh.gateway.run(tokens, sampling, expected=expected)
            assert (answer.tokens, answer.attempts) == (mesh.expect(tokens, sampling), 1)
            assert answer.usage and answer.usage.cached_tokens == (96 if warm else 0)
            reported = mesh.gateway.loads[mesh.prefills[0].ref.id]
            assert reported.queued_tokens == {6: 4, 0: 100, 99: 1}[expected]
            await mesh.quiet()
            assert mesh.prefills[0].load().queue_ms == 0

    kit.run(main())


def test_prefix_fetched_from_another_node(kit: Any) -> None:
    async def main() -> None:
        async with kit.mesh(prefills=2, decodes=2) as mesh:
            tokens, sampling = kit.tokens(100), kit.greedy(6)
            await mesh.gateway.run(tokens, sampling)
            source = Source("node-p0", 6)
            other = await mesh.gateway.run(tokens, sampling, pairs=[(1, 1)], fetch=6, sources=[source])
            assert other.tokens == mesh.expect(tokens, sampling)
            assert other.usage and (other.usage.fetched_blocks, other.usage.cached_tokens) == (6, 96)
            await mesh.quiet()

    kit.run(main())
