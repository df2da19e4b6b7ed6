"""ACCEPTANCE B6, D4 to D6 through a whole mesh: a prefill that outlasts every lease, and load that spreads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.mesh.mesh import BLOCK, Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.chaos]

PREFILLS = 4
TOKEN_S = 2e-3
LEASE_TTL_S, LISTS_S = 0.2, 3.0
"""What a reader's lease lasts, and the silence after which an instance drops what no conductor lists."""
SLOW = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0",
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": str(TOKEN_S),
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": "0",
    "MOONCAKE_SIMULATED_DECODE_BASE_S": "0.001",
    "MOONCAKE_LEASE_TTL": str(LEASE_TTL_S),
}
Tokens = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def mesh(up: Callable[..., Mesh]) -> Iterator[Mesh]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SLOW.items():
            patch.setenv(name, value)
        running = up("--engine", "simulated", "--context-length", "16384", "--prefill", str(PREFILLS), "--decode", "2")
    yield running
    assert running.total("mooncake_simulated_kv_mismatches_total") == 0


def served(mesh: Mesh) -> Counter[str]:
    """First tokens by prefill instance."""
    return Counter({one["id"]: one["served"] for one in mesh.cluster()["instances"] if one["role"] == "prefill"})


async def offered(mesh: Mesh, prompts: Sequence[list[int]]) -> float:
    """All at once; requests of the busiest prefill instance over the mean."""
    before = served(mesh)
    answers = await asyncio.gather(*(mesh.ask(prompt, max_tokens=2) for prompt in prompts))
    assert {one.status for one in answers} == {200}
    counts = served(mesh) - before
    return max(counts.values()) * PREFILLS / sum(counts.values())


def hits(mesh: Mesh) -> tuple[float, float]:
    """(tokens of prompts, those of them that were not computed)."""
    names = ("mooncake_conductor_prompt_tokens_total", "mooncake_conductor_hit_tokens_total")
    return mesh.total(names[0]), mesh.total(names[1])


async def test_d6_ties_of_an_idle_mesh_spread(mesh: Mesh, tokens: Tokens) -> None:
    """While nothing is known of the instances but what they published."""
    before = served(mesh)
    for _ in range(4 * PREFILLS):
        assert (await mesh.ask(tokens(4 * BLOCK), max_tokens=2)).status == 200
    assert set(served(mesh) - before) == set(before)


async def test_b6_a_prefill_slower_than_every_lease_is_not_lost(mesh: Mesh, tokens: Tokens) -> None:
    """Its cached prefix is leased from the node that computed it; the rest takes longer than any lease and longer than
    three lists. It is neither dropped nor begun again, and the answer is that of a warm one."""
    prefix, rest = tokens(10 * BLOCK), tokens(round((LISTS_S + 2.5) / TOKEN_S))
    assert (await mesh.ask(prefix, max_tokens=2)).status == 200
    await mesh.indexed(10)
    retried = mesh.cluster()["requests"]["retried"]
    slow = await mesh.ask([*prefix, *rest], max_tokens=8)
    assert (slow.status, slow.cached) == (200, len(prefix)), slow.error
    assert mesh.cluster()["requests"]["retried"] == retried
    warm = await mesh.ask([*prefix, *rest], max_tokens=8)
    assert (warm.status, warm.text) == (200, slow.text) and warm.cached > len(prefix)
    assert await mesh.settled() == {}


async def test_d4_one_hot_prefix_at_a_high_rate_spreads_with_its_hits_kept(mesh: Mesh, tokens: Tokens) -> None:
    hot = tokens(20 * BLOCK)
    assert (await mesh.ask(hot, max_tokens=2)).status == 200
    await mesh.indexed(20)
    prompt, hit = hits(mesh)
    assert await offered(mesh, [[*hot, *tokens(BLOCK)] for _ in range(80)]) <= 1.5
    after = hits(mesh)
    assert (after[1] - hit) / (after[0] - prompt) >= 0.8  # of 0.95 that can be had


async def test_d5_sharing_the_first_block_only_does_not_gather(mesh: Mesh, tokens: Tokens) -> None:
    first = tokens(BLOCK)
    assert await offered(mesh, [[*first, *tokens(6 * BLOCK)] for _ in range(40)]) <= 1.5
