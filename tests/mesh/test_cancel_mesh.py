"""B1: a client that goes away in any phase leaves nothing behind, twenty times over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp
import pytest

if TYPE_CHECKING:
    from tests.mesh.conftest import Alone
    from tests.mesh.mesh import Mesh

pytestmark = [pytest.mark.mesh]
REPETITIONS = 20
LONG = 2500


async def _first_event(response: aiohttp.ClientResponse) -> None:
    async for line in response.content:
        if line.startswith(b"data: "):
            return


async def _leave(mesh: Mesh, prompt: list[int], stream: bool, after: float, wait_first: bool) -> None:
    """Send a request, wait, cut the connection."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 800,
        "temperature": 0,
        "stream": stream,
        "ignore_eos": True,
    }
    async with mesh.session() as session:
        sending = asyncio.ensure_future(session.post(mesh.url + "/v1/completions", json=body))
        if wait_first and stream:
            await _first_event(await sending)
        await asyncio.sleep(after)
        sending.cancel()
        [response] = await asyncio.gather(sending, return_exceptions=True)
        if isinstance(response, aiohttp.ClientResponse):
            response.close()  # not released: the connection is cut


@pytest.mark.parametrize(
    ("phase", "transport"), [("prefill", "shm"), ("transfer", "shm"), ("decode", "shm"), ("transfer", "tcp")]
)
async def test_b1_disconnect(
    walk: Callable[[str], Mesh], alone: Alone, tokens: Callable[[int], list[int]], phase: str, transport: str
) -> None:
    """One of two clients streams."""
    mesh = walk(transport)
    probe = tokens(40)
    expected = alone(probe)
    await mesh.ask(probe)
    assert await mesh.settled(within=5.0) == {}, "nothing is held while idle"
    rng = random.Random(phase)

    async def leave(stream: bool) -> None:
        prompt = tokens(LONG if phase != "decode" else 40)
        # a non-streaming client sees no first token: by then a prompt of 40 tokens is being decoded
        after = {
            "prefill": rng.uniform(0.02, 0.2),
            "transfer": rng.uniform(0.2, 0.9),
            "decode": rng.uniform(0.15, 0.4),
        }[phase]
        await _leave(mesh, prompt, stream, after, wait_first=phase == "decode")

    for _ in range(REPETITIONS // 2):  # two at a time: each has a prefill instance of its own
        await asyncio.gather(leave(False), leave(True))
    assert await mesh.settled(within=2.0) == {}
    again = await mesh.ask(probe)
    assert again.text == expected
    running = mesh.cluster()["requests"]["running"]
    assert running == 0
