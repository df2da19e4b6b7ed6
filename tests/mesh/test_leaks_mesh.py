"""What a mesh holds after many requests, a third of which were cancelled at random times: nothing. And a conductor that
starts when much is cached already."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.clients.live import conductor_beside
from tests.mesh.mesh import MODEL, Mesh

pytestmark = [pytest.mark.mesh]

AT_ONCE = 64
MANY = int(os.environ.get("MOONCAKE_TEST_REQUESTS", "1000"))
CACHED = 10_000
BLOCK = 32


@pytest.fixture(scope="module")
def mesh(simulated: Callable[[], Mesh]) -> Iterator[Mesh]:
    running = simulated()
    yield running
    assert running.total("mooncake_simulated_kv_mismatches_total") == 0


async def one(session: aiohttp.ClientSession, mesh: Mesh, rng: random.Random, shared: list[int]) -> str:
    """A streamed completion. Every third goes away: before the answer's head, or in the middle of its events."""
    prompt = [*shared[: rng.randrange(0, 200)], *(rng.randrange(10, 250) for _ in range(rng.randrange(1, 200)))]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randrange(1, 24), "stream": True, "ignore_eos": True}
    patience = rng.choice([rng.uniform(0, 0.02), rng.uniform(0, 0.3)]) if rng.random() < 1 / 3 else 100.0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            async with session.post(mesh.url + "/v1/completions", data=json.dumps(body)) as response:
                text = await response.text()
                if response.status == 429 and json.loads(text)["error"]["reason"] == "backlog":  # a busy machine
                    await asyncio.sleep(int(response.headers["Retry-After"]))
                    return "refused"
                return "done" if response.status == 200 and "[DONE]" in text else f"{response.status}: {text[-200:]}"
    return "cancelled"


async def rush(mesh: Mesh, count: int) -> dict[str, int]:
    """How ``count`` requests ended, :data:`AT_ONCE` at a time."""
    rng, ends = random.Random(count), dict[str, int]()
    shared, left = [rng.randrange(10, 250) for _ in range(200)], iter(range(count))
    async with mesh.session({"Content-Type": "application/json"}) as session:

        async def worker(seed: int) -> None:
            own = random.Random(seed)
            for _ in left:
                how = await one(session, mesh, own, shared)
                ends[how] = ends.get(how, 0) + 1

        await asyncio.gather(*(worker(seed) for seed in range(AT_ONCE)))
    return ends


async def nothing_is_left(mesh: Mesh, count: int) -> dict[str, int]:
    """How the requests ended."""
    ends = await rush(mesh, count)
    assert set(ends) <= {"done", "cancelled", "refused"} and ends["done"] and sum(ends.values()) == count
    assert ends["cancelled"] > count / 10
    assert await mesh.settled() == {}
    deadline = asyncio.get_running_loop().time() + 100
    while busy := [one for one in mesh.cluster()["instances"] if one["load"]["queued"] or one["load"]["running"]]:
        assert asyncio.get_running_loop().time() < deadline, busy  # loads are told once a second
        await asyncio.sleep(0.2)
    picture = mesh.cluster()
    assert picture["requests"]["running"] == 0 and picture["requests"]["failed"] == 0
    decodes = [one["load"] for one in picture["instances"] if one["role"] == "decode"]
    assert all(load["kv_tokens"] == 0 and load["room_blocks"] >= 0.9 * load["total_blocks"] for load in decodes)
    return ends


async def test_nothing_is_held_after_requests_of_which_a_third_was_cancelled(mesh: Mesh) -> None:
    await nothing_is_left(mesh, 300)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_nothing_is_held_after_many_more_requests_of_which_a_third_was_cancelled(
    mesh: Mesh, record_testsuite_property: Callable[[str, object], None]
) -> None:
    record_testsuite_property("ends", await nothing_is_left(mesh, MANY))


async def test_b4_a_conductor_that_starts_late_hits_at_once(mesh: Mesh, tmp_path: Path) -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(10, 250) for _ in range(CACHED * BLOCK // 2 + 1)] for _ in range(2)]
    for prompt in prompts:
        assert (await mesh.ask(prompt, max_tokens=1)).status == 200
    await mesh.indexed(CACHED)
    with conductor_beside(mesh, tmp_path) as late:
        answers = [await Mesh(late.url, mesh.child, late.log).ask(prompt, max_tokens=1) for prompt in prompts]
    assert [(one.status, one.cached) for one in answers] == [(200, CACHED * BLOCK // 2)] * 2
