"""A pool smaller than the model's context bounds it: an output that fills the pool ends, it does not fail."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("slots", [6, 16])
def test_an_output_ends_where_the_pool_does(kit: Any, slots: int) -> None:
    async def main() -> None:
        async with kit.mesh(slots=slots) as mesh:
            service = mesh.decodes[0]
            limit = service.context_length
            assert limit < service.engine.context_length
            answer = await mesh.gateway.run(kit.tokens(20), kit.greedy(limit * 2), attempts=1)
            assert answer.finish == "length"
            assert 20 + len(answer.tokens) == limit
            await mesh.quiet(6.0)

    kit.run(main())
