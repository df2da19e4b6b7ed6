"""A mesh whose processes are killed and stopped under load: the same text, nothing held, nothing else restarted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest
import redis

if TYPE_CHECKING:
    from tests.mesh.conftest import Alone
    from tests.mesh.mesh import Answer, Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.chaos]

FLAGS = ("--prefill", "2", "--decode", "2", "--policy", "least_loaded", "--transport", "tcp")
OUTPUT = 120
LENGTHS = (5, 33, 200, 700)
Tokens = Callable[[int], list[int]]


async def under_load(mesh: Mesh, alone: Alone, tokens: Tokens, fault: Callable[[], object], after: float = 0.6) -> None:
    """Streams of several lengths, the fault in their middle; all must end with the text of the single process."""
    prompts = [tokens(length) for length in LENGTHS]
    expected = await asyncio.to_thread(lambda: [alone(prompt, OUTPUT) for prompt in prompts])
    streams = [asyncio.create_task(mesh.ask(prompt, stream=True, max_tokens=OUTPUT)) for prompt in prompts]
    await asyncio.sleep(after)
    await asyncio.to_thread(fault)
    answers: list[Answer] = await asyncio.gather(*streams)
    for answer, text in zip(answers, expected, strict=True):
        assert (answer.status, answer.error, answer.text) == (200, {}, text)


async def whole(mesh: Mesh) -> None:
    """Wait until every process is back (a killed one's record stands for a while), and nothing is held."""
    async with asyncio.timeout(200):
        while True:
            with contextlib.suppress(OSError):
                instances = (await asyncio.to_thread(mesh.cluster))["instances"]
                if [one["state"] for one in instances] == ["alive"] * 4:
                    await asyncio.to_thread(mesh.scrapes)
                    break
            await asyncio.sleep(0.2)
    assert await mesh.settled(within=14.0) == {}


def stopped(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "module", ["services.decode", "services.prefill", "services.store", "nats-server", "valkey-server"]
)
async def test_b2_killed(up: Callable[..., Mesh], alone: Alone, tokens: Tokens, module: str) -> None:
    mesh = up(*FLAGS)
    await whole(mesh)
    await under_load(mesh, alone, tokens, lambda: os.kill(find(mesh, module), signal.SIGKILL))
    await whole(mesh)
    probe = tokens(40)
    assert (await mesh.ask(probe)).text == alone(probe)


@pytest.mark.parametrize("module", ["services.decode", "nats-server"])
async def test_b2_stopped_for_a_moment(up: Callable[..., Mesh], alone: Alone, tokens: Tokens, module: str) -> None:
    mesh = up(*FLAGS)
    await whole(mesh)
    await under_load(mesh, alone, tokens, lambda: stopped(find(mesh, module), 4.0))
    await whole(mesh)


@pytest.mark.parametrize("node", ["node-d0", "node-p0"])
async def test_b2_an_agent_that_is_stopped_is_left(
    up: Callable[..., Mesh], alone: Alone, tokens: Tokens, node: str
) -> None:
    """While it is stopped, its engine takes no new work and what ran there goes on elsewhere."""
    mesh = up(*FLAGS)
    await whole(mesh)
    pid = mesh.pid("services.store", node)
    os.kill(pid, signal.SIGSTOP)
    try:
        await under_load(mesh, alone, tokens, lambda: None)
        await asyncio.sleep(4)  # by now it is suspected
        probe = tokens(40)
        for answer in await asyncio.gather(*(mesh.ask(probe, max_tokens=4) for _ in range(4))):
            assert (answer.status, answer.text) == (200, alone(probe, 4))
        states = {one["id"]: one["load"]["draining"] for one in mesh.cluster()["instances"]}
        assert [id for id, draining in states.items() if draining] == [
            {"node-d0": "decode-0", "node-p0": "prefill-0"}[node]
        ]
    finally:
        os.kill(pid, signal.SIGCONT)
    await whole(mesh)


async def test_b3_flush_and_junk_in_redis(up: Callable[..., Mesh], alone: Alone, tokens: Tokens) -> None:
    mesh = up(*FLAGS)
    await whole(mesh)
    server = find_process(mesh, "valkey-server")
    client = redis.Redis(port=next(c.laddr.port for c in server.net_connections("tcp") if c.status == "LISTEN"))

    def flush_and_litter() -> None:
        client.flushall()
        time.sleep(1.5)
        for key in client.keys("mc:*"):
            if client.type(key) == b"hash":
                client.hset(key, b"\xffjunk", b"zzz")
            elif client.type(key) == b"zset":
                client.zadd(key, {b"\xffjunk": 1e18})
            elif client.type(key) == b"stream":
                client.xadd(key, {b"e": b"junk"})

    await under_load(mesh, alone, tokens, flush_and_litter)
    os.kill(mesh.pid("services.prefill", "prefill-1"), signal.SIGKILL)
    await whole(mesh)  # who registers anew is seen
    assert mesh.get("/ready")["degraded"] == []


async def test_contention_in_a_small_pool(up: Callable[..., Mesh], alone: Alone, tokens: Tokens) -> None:
    """64 at once where a handful fit: each ends with its text, or with 429 and a time; obeyed, all are served."""
    mesh = up("--prefill", "1", "--decode", "1", "--pool-bytes", "2MiB", "--transport", "tcp")
    rng = random.Random(5)
    shared = tokens(200)
    lengths = [rng.choice([3, 31, 32, 33, 90, 400]) for _ in range(64)]
    prompts = [(shared if i % 4 == 0 else []) + tokens(length) for i, length in enumerate(lengths)]

    async def persist(prompt: list[int], stream: bool) -> str:
        async with asyncio.timeout(100):
            while True:
                answer = await mesh.ask(prompt, stream=stream, max_tokens=8)
                if answer.status != 429:
                    assert (answer.status, answer.error) == (200, {})
                    return answer.text
                await asyncio.sleep(int(answer.headers["Retry-After"]) * rng.uniform(0.2, 1.0))

    texts = await asyncio.gather(*(persist(prompt, i % 2 == 0) for i, prompt in enumerate(prompts)))
    assert texts == await asyncio.to_thread(lambda: [alone(prompt, 8) for prompt in prompts])
    assert await mesh.settled(within=2.0) == {}
    full = await mesh.ask(tokens(1500), max_tokens=None, ignore_eos=True)
    assert (full.status, full.finish) == (200, "length"), "an output that fills the pool ends there"
    assert await mesh.settled(within=2.0) == {}


def find_process(mesh: Mesh, words: str) -> psutil.Process:
    """The first of its processes with these words in the command line."""
    for process in psutil.Process(mesh.child.pid).children(recursive=True):
        if words in " ".join(process.cmdline()):
            return process
    raise LookupError(words)


def find(mesh: Mesh, words: str) -> int:
    return find_process(mesh, words).pid
