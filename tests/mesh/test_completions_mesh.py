"""A1 to A4, A6: what the mesh answers is what a single process answers, wherever the prefix was."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from shared.blocks import chain_keys, split_keys
from shared.index.lookup import lookup
from shared.messages import Sampling
from shared.redis_client import RedisLink

if TYPE_CHECKING:
    from shared.engines.local import LocalRunner
    from tests.mesh.conftest import Alone
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh]
B = 32
LONG = 40  # blocks: long enough that fetching beats computing by far
TRANSPORTS = ["tcp", "shm"]
TRIES = 5
"""Prompts of which the other node has to fetch one: a link that was measured beside the work of others may seem slower
than computing, until it is measured again."""


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mesh(walk: Callable[[str], Mesh], transport: str) -> Mesh:
    return walk(transport)


@pytest.mark.parametrize("stream", [False, True])
async def test_a1_cold_then_warm_on_another_node_then_warm_local(
    mesh: Mesh, transport: str, alone: Alone, tokens: Callable[[int], list[int]], stream: bool
) -> None:
    prompts = (tokens(LONG * B + 9) for _ in range(TRIES))
    prompt = await _fetched(mesh, transport, alone, prompts, stream)
    local = await mesh.ask(prompt, stream=stream)
    assert (local.text, local.cached) == (alone(prompt), LONG * B)
    others = {"tcp", "shm", "rdma"} - {transport}
    assert not sum(mesh.total("mooncake_store_transfer_bytes_total", transport=other) for other in others)


async def _fetched(mesh: Mesh, transport: str, alone: Alone, prompts: Iterable[list[int]], stream: bool) -> list[int]:
    """The first prompt that one node computed and the other fetched."""
    slot = await mesh.slot_bytes()
    for prompt in prompts:
        expected, held = alone(prompt), sum(mesh.cluster()["index"]["blocks"].values())
        cold = await mesh.ask(prompt, stream=stream)
        assert (cold.text, cold.cached) == (expected, 0)
        await mesh.indexed(held + LONG)
        before = _moved(mesh, transport)
        other = await mesh.ask(prompt, stream=stream)
        assert other.text == expected
        assert other.cached in (0, LONG * B)
        assert _moved(mesh, transport) - before == other.cached // B * slot, "blocks × size, between two agents"
        if other.cached:
            return prompt
    pytest.fail("no prompt was fetched: each was rather computed")


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 3 * B - 1, 3 * B, 3 * B + 1, 1, 7])
async def test_a2_block_boundaries_warm_and_cold(
    mesh: Mesh, alone: Alone, tokens: Callable[[int], list[int]], length: int
) -> None:
    prompt = tokens(length)
    expected, full = alone(prompt), length // B * B
    warm = min(full, length - 1)
    for possible in ({0}, {0, warm}, {warm}):  # the second node may compute what is so short; the third ask is local
        answer = await mesh.ask(prompt)
        assert answer.text == expected
        assert answer.usage["prompt_tokens"] == length
        assert answer.cached in possible
        await mesh.indexed()


async def test_a3_one_token(mesh: Mesh, alone: Alone, tokens: Callable[[int], list[int]]) -> None:
    prompt = tokens(2 * B + 3)
    for stream in (False, True):
        answer = await mesh.ask(prompt, max_tokens=1, stream=stream)
        assert (answer.text, answer.finish) == (alone(prompt, 1), "length")
        assert answer.usage["completion_tokens"] == 1
    assert await mesh.settled() == {}


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.parametrize(("length", "output"), [(2 * B, 1), (2 * B + 20, 12), (B + 1, 2 * B), (B + 30, 7), (5, 3)])
async def test_who_has_the_last_token_finds_all_full_blocks_in_the_index(
    mesh: Mesh, runner: LocalRunner, tokens: Callable[[int], list[int]], length: int, output: int
) -> None:
    """The next turn may come at once: nothing waits between the answer and the look at the index. A token waits for a
    quarter of a second at most, so where the machine is busy with others another try says more."""
    link = RedisLink(psutil.Process(mesh.pid("services.conductor")).environ()["MOONCAKE_REDIS"])
    for stream in (False, True, False, True):
        there, late = False, math.inf
        while not there:
            assert late > 0.02, "nobody was kept waiting, and yet it was not there"
            prompt = tokens(length)
            sampling = Sampling(max_tokens=output, seed=0, temperature=0.0)
            drawn = [o.token for o in runner.generate(np.array(prompt, dtype=np.uint32), sampling)]
            keys = chain_keys(runner.engine.namespace.root(), np.array(prompt + drawn, dtype=np.uint32), B)
            async with held_up() as found:
                assert (await mesh.ask(prompt, max_tokens=output, stream=stream, ignore_eos=True)).status == 200
                places = await lookup(link, "default", split_keys(keys))
            there, late = all(places), max(found)
            assert len(places) == (length + output) // B
    await link.close()


@contextlib.asynccontextmanager
async def held_up() -> AsyncIterator[list[float]]:
    """By how many seconds this process was late each time that it wanted to run: so were those of the mesh."""
    found, loop = [0.0], asyncio.get_running_loop()

    async def look() -> None:
        while True:
            due = loop.time() + 0.01
            await asyncio.sleep(0.01)
            found.append(loop.time() - due)

    looking = asyncio.create_task(look())
    try:
        yield found
    finally:
        looking.cancel()


async def test_a4_first_token_is_a_stop_token(
    mesh: Mesh, tokens: Callable[[int], list[int]], first_token: Callable[[list[int]], int]
) -> None:
    prompt = tokens(B + 5)
    stop = first_token(prompt)
    for stream in (False, True):
        answer = await asyncio.wait_for(mesh.ask(prompt, stop_token_ids=[stop], stream=stream), 100)
        assert (answer.text, answer.finish, answer.usage["completion_tokens"]) == ("", "stop", 1)
    assert await mesh.settled() == {}


@pytest.mark.parametrize(("length", "output"), [(4096, 1), (5000, 1), (4000, 97), (10, 4090)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a6_longer_than_the_context(
    mesh: Mesh, tokens: Callable[[int], list[int]], length: int, output: int, stream: bool
) -> None:
    answer = await mesh.ask(tokens(length), max_tokens=output, stream=stream)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "4096" in answer.error["message"]
    assert (await mesh.ask(tokens(10))).status == 200


async def test_seeded_sampling_is_the_single_process_too(
    mesh: Mesh, alone: Alone, tokens: Callable[[int], list[int]]
) -> None:
    prompt = tokens(B + 11)
    for seed in (1, 2):
        expected = alone(prompt, 24, temperature=0.9, top_p=0.9, top_k=40, seed=seed)
        answer = await mesh.ask(prompt, max_tokens=24, temperature=0.9, top_p=0.9, top_k=40, seed=seed)
        assert answer.text == expected


async def test_many_at_once_of_mixed_length(mesh: Mesh, alone: Alone, tokens: Callable[[int], list[int]]) -> None:
    head = tokens(2 * B)
    prompts = [head + tokens(n) if n % 3 == 0 else tokens(n) for n in range(1, 100, 7)]
    answers = await asyncio.gather(*(mesh.ask(p, max_tokens=20, stream=bool(n % 2)) for n, p in enumerate(prompts)))
    assert [a.text for a in answers] == [alone(p, 20) for p in prompts]


def _moved(mesh: Mesh, transport: str) -> float:
    """Bytes that fetches brought in (streams into landings are writes)."""
    return mesh.total("mooncake_store_transfer_bytes_total", transport=transport, direction="in")
