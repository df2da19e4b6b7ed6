"""Size and number: prompts of 200,000 tokens and many streams through a whole mesh of simulated engines."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.mesh.conftest import CONTEXT
from tests.mesh.mesh import MODEL, Mesh

pytestmark = [pytest.mark.mesh]

LONG = 200_000


@pytest.fixture(scope="module")
def mesh(simulated: Callable[[], Mesh]) -> Iterator[Mesh]:
    running = simulated()
    yield running
    assert running.total("mooncake_simulated_kv_mismatches_total") == 0


def long_text(model: Path, rng: random.Random) -> tuple[str, int]:
    """A text of about LONG tokens, and how many they are."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = [rng.choice(["lake", "moon", "cake", "river", "over", "hill", "and"]) for _ in range(LONG)]
    each = len(tokenizer.encode(" ".join(words[:1000])).ids) / 1000
    text = " ".join(words[: int(LONG / each)])
    return text, len(tokenizer.encode(text).ids)


@pytest.mark.parametrize("kind", ["token ids", "text"])
async def test_a7_a_prompt_of_200_000_tokens_cold_and_warm(mesh: Mesh, tiny: Path, kind: str) -> None:
    """Its messages are larger than NATS takes: they travel in parts."""
    rng, count = random.Random(kind), LONG
    prompt: Any
    if kind == "token ids":
        prompt = [rng.randrange(10, 250) for _ in range(LONG)]
    else:
        prompt, count = long_text(tiny, rng)
    cold = await mesh.ask(prompt, max_tokens=5)
    assert cold.status == 200, cold.error
    assert (cold.usage["prompt_tokens"], cold.usage["completion_tokens"]) == (count, 5)
    assert cold.cached == 0
    warm = await mesh.ask(prompt, max_tokens=5)
    assert warm.status == 200, warm.error
    assert (warm.text, warm.usage["prompt_tokens"]) == (cold.text, count)
    assert count - 64 <= warm.cached < count


async def test_a_prompt_beyond_the_context_is_refused(mesh: Mesh) -> None:
    refused = await mesh.ask([100] * CONTEXT, max_tokens=1)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


async def test_many_streams_at_once_are_all_whole(mesh: Mesh) -> None:
    rng = np.random.default_rng(7)
    prompts = [[int(t) for t in rng.integers(10, 250, 40)] for _ in range(200)]
    answers = await asyncio.gather(*(mesh.ask(p, max_tokens=40, stream=True) for p in prompts))
    assert {(a.status, a.finish, a.usage.get("completion_tokens")) for a in answers} == {(200, "length", 40)}
    assert len({a.text for a in answers}) == len(answers)
    again = await asyncio.gather(*(mesh.ask(p, max_tokens=40) for p in prompts[:20]))
    assert [a.text for a in again] == [a.text for a in answers[:20]]
    assert not await mesh.settled()


async def test_a_reader_that_stops_in_a_long_answer_is_cut_off_and_nothing_stays(mesh: Mesh) -> None:
    """Decode may go on meanwhile; once the client is cut off, it ends too."""
    host, _, port = mesh.url.removeprefix("http://").partition(":")
    body = json.dumps({"model": MODEL, "prompt": [50] * 40, "max_tokens": 200_000, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    loop, cut = asyncio.get_running_loop(), mesh.total("mooncake_gateway_stalled_readers_total")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        beside = await mesh.ask([60] * 40, max_tokens=40)
        assert beside.usage["completion_tokens"] == 40
        async with asyncio.timeout(100):
            while mesh.total("mooncake_gateway_stalled_readers_total") == cut:
                await asyncio.sleep(0.2)
        assert not await mesh.settled()
