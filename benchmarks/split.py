"""The split against one process: TTFT of cold prompts, and decode tokens/s by batch, at one thread an engine.

Contenders: the mesh (prefill and decode in two processes), one process over the same engine, and plain
``transformers`` (its own ``generate`` with its own cache).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import aiohttp
import numpy as np

from benchmarks.client import complete
from benchmarks.processes import Mesh, cpu_seconds, mesh
from benchmarks.report import Row, row
from shared.messages import Sampling

LENGTHS = (1000, 2000)
BATCHES = (1, 4, 16)
CONTEXT, OUTPUT = 256, 48


class OneProcess:
    """Our engine in this process, and plain transformers over the same weights."""

    def __init__(self, path: str) -> None:
        import os

        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from shared.engines.local import LocalRunner
        from shared.engines.transformers import TransformersEngine

        self.runner = LocalRunner(TransformersEngine(path, threads=1), slots=1024)
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def ttft(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        self.runner.generate(np.array(tokens, dtype=np.uint32), Sampling(max_tokens=1, seed=0, temperature=0))
        return time.perf_counter() - start

    def ours(self, prompts: list[list[int]], output: int) -> None:
        sampling = Sampling(max_tokens=output, seed=0, temperature=0)
        self.runner.generate_many([(np.array(p, dtype=np.uint32), sampling) for p in prompts])

    def library(self, prompts: list[list[int]], output: int) -> None:
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            self.plain.generate(ids, max_new_tokens=output, min_new_tokens=output, do_sample=False, pad_token_id=0)


async def measure(model: str, path: str, rounds: int) -> list[Row]:
    """Interleaved rounds; every contender gets fresh prompts of the same lengths."""
    rng, local, rows = random.Random(11), OneProcess(path), []
    with mesh("--prefill", "1", "--decode", "1") as running:
        async with aiohttp.ClientSession() as session:
            local.ttft(_tokens(rng, 64))
            await complete(session, running.url, _tokens(rng, 64), model=model, max_tokens=8, temperature=0)
            rows += await _ttft(session, running, local, model, rng, rounds)
            rows += await _decode(session, running, local, model, rng, rounds)
    return rows


async def _ttft(
    session: aiohttp.ClientSession, running: Mesh, local: OneProcess, model: str, rng: random.Random, rounds: int
) -> list[Row]:
    rows = []
    for length in LENGTHS:
        split, single = [], []
        for _ in range(rounds):
            answer = await complete(
                session, running.url, _tokens(rng, length), model=model, max_tokens=1, temperature=0
            )
            split.append(answer.ttft)
            single.append(local.ttft(_tokens(rng, length)))
        what = f"TTFT, {length:,}-token prompt, cold"
        rows.append(row(what, "mesh (split)", [1e3 * t for t in split], "ms"))
        rows.append(row(what, "one process", [1e3 * t for t in single], "ms"))
        ratios = [a / b for a, b in zip(split, single, strict=True)]
        rows.append(row(what, "split / one process", ratios, "ratio", note="budget 1.05"))
    return rows


async def _decode(
    session: aiohttp.ClientSession, running: Mesh, local: OneProcess, model: str, rng: random.Random, rounds: int
) -> list[Row]:
    """Tokens/s while decoding: the time of OUTPUT tokens less the time of the first, so that prefill does not count."""
    rows = []
    for batch in BATCHES:
        names = ("mesh", "one process", "transformers")
        rates: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            await _mesh_rate(session, running, model, rng, batch, rates["mesh"], cpu["mesh"])
            for name, run in (("one process", local.ours), ("transformers", local.library)):
                _local_rate(run, rng, batch, rates[name], cpu[name])
        for name in names:
            mean_cpu = sum(cpu[name]) / rounds
            note = "" if name == "mesh" else "time of 1 token taken off"
            rows.append(row(f"decode, batch {batch}, context {CONTEXT}", name, rates[name], "tokens/s", mean_cpu, note))
    return rows


async def _mesh_rate(
    session: aiohttp.ClientSession,
    running: Mesh,
    model: str,
    rng: random.Random,
    batch: int,
    rates: list[float],
    cpu: list[float],
) -> None:
    """Steady rate: from when the last stream had its first token until the first stream ends."""
    before = running.cpu()
    asks = [
        complete(
            session,
            running.url,
            _tokens(rng, CONTEXT),
            model=model,
            max_tokens=2 * OUTPUT,
            temperature=0,
            ignore_eos=True,
        )
        for _ in range(batch)
    ]
    answers = await asyncio.gather(*asks)
    begin, end = max(a.ttft for a in answers), min(a.times[-1] for a in answers)
    tokens = sum(sum(begin < t <= end for t in a.times) for a in answers)
    if end > begin and tokens:
        rates.append(tokens / (end - begin))
    cpu.append(running.cpu() - before)


def _local_rate(
    run: Callable[[list[list[int]], int], None], rng: random.Random, batch: int, rates: list[float], cpu: list[float]
) -> None:
    import os

    prompts = [_tokens(rng, CONTEXT) for _ in range(batch)]
    before, start = cpu_seconds(os.getpid()), time.perf_counter()
    run(prompts, 1)
    first = time.perf_counter()
    run([_tokens(rng, CONTEXT) for _ in range(batch)], OUTPUT)
    rates.append(batch * (OUTPUT - 1) / max(1e-9, (time.perf_counter() - first) - (first - start)))
    cpu.append(cpu_seconds(os.getpid()) - before)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]
