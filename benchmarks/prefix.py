"""TTFT of a 2,000-token prompt: cold, 95 % warm on the same node, 95 % warm on another node."""

from __future__ import annotations

import asyncio
import random

import aiohttp

from benchmarks.client import Answer, complete
from benchmarks.processes import Mesh, mesh
from benchmarks.report import Row, row

PROMPT, SHARED, BLOCK, VOCABULARY = 2000, 1900, 32, 40_000


async def measure(model: str, rounds: int) -> list[Row]:
    """The two prefill nodes take turns: in each round a prompt is cold on one node, warm on the other, then warm on
    the first. What was cached is asserted; rounds alternate which node starts."""
    rng = random.Random(7)
    names = ("cold", "95 % warm, another node", "95 % warm, same node")
    ttft: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, float] = dict.fromkeys(names, 0.0)
    with mesh("--prefill", "2", "--decode", "1", "--policy", "least_loaded") as running:
        async with aiohttp.ClientSession() as session:
            await _ask(session, running, model, _tokens(rng, 200))
            await _ask(session, running, model, _tokens(rng, 200))
            for _ in range(rounds):
                head = _tokens(rng, SHARED)
                for name in names:
                    await asyncio.sleep(0.5)  # the last chunk's blocks reach the index after the first token left
                    before = running.cpu()
                    answer = await _ask(session, running, model, head + _tokens(rng, PROMPT - SHARED))
                    expected = 0 if name == "cold" else SHARED // BLOCK * BLOCK
                    if answer.cached != expected:
                        raise RuntimeError(f"{name}: {answer.cached} cached tokens, expected {expected}")
                    ttft[name].append(answer.ttft)
                    cpu[name] += running.cpu() - before
                await _ask(session, running, model, _tokens(rng, 40))  # an odd number: the next round starts elsewhere
    rows = [row("TTFT, 2,000-token prompt", n, [1e3 * t for t in ttft[n]], "ms", cpu[n] / rounds) for n in names]
    for name in names[1:]:
        ratios = [warm / cold for warm, cold in zip(ttft[name], ttft["cold"], strict=True)]
        rows.append(row("TTFT against cold", name, ratios, "ratio", note="budget 0.10"))
    return rows


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, VOCABULARY) for _ in range(count)]


async def _ask(session: aiohttp.ClientSession, running: Mesh, model: str, prompt: list[int]) -> Answer:
    answer = await complete(session, running.url, prompt, model=model, max_tokens=1, temperature=0)
    if answer.error:
        raise RuntimeError(answer.error)
    return answer
