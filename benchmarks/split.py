"""The split against one process: TTFT of cold prompts, and decode tokens/s by batch, at one thread an engine.

Contenders: the mesh (prefill and decode in two processes), one process over the same engine, and plain
``transformers`` (its own ``generate`` with its own cache).

Where a core's speed changes from second to second, two runs of the same prompt differ by a fifth. So pairs are many and
change places, and what the mesh adds is also read from its own trace: the time to the first token less that of the
engine's steps, which hardly depends on the core.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmarks.client import complete
from benchmarks.processes import Mesh, cpu_seconds, mesh
from benchmarks.report import Row, row
from shared.engines.base import Drawn, Work
from shared.messages import Sampling
from shared.span_record import Traced

PAIRS = {1000: 4, 2000: 2}
"""Prompt tokens, and pairs of them in a round."""
BATCHES = (1, 4, 16)
CONTEXT, OUTPUT = 256, 96
BUDGET = 1.05


class OneProcess:
    """Our engine in this process, and plain transformers over the same weights."""

    def __init__(self, path: str) -> None:
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

    def ours(self, prompts: list[list[int]], output: int) -> list[float]:
        """When each step ended, from the one that leaves nothing of a prompt on: seconds of ``perf_counter``."""
        sampling = Sampling(max_tokens=output, seed=0, temperature=0)
        engine, ends = self.runner.engine, list[float]()
        step = engine.step

        def timed(batch: Sequence[Work]) -> list[Drawn | None]:
            drawn = step(batch)
            if len(drawn) == len(prompts) and all(drawn):
                ends.append(time.perf_counter())
            return drawn

        with patched(engine, "step", timed):
            self.runner.generate_many([(np.array(p, dtype=np.uint32), sampling) for p in prompts])
        return ends

    def library(self, prompts: list[list[int]], output: int) -> list[float]:
        """When each token was drawn: its logits are looked at once a step."""
        ends: list[float] = []

        def look(_ids: Any, logits: Any) -> Any:
            ends.append(time.perf_counter())
            return logits

        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            self.plain.generate(
                ids,
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[look],
            )
        return ends


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner`` has another method for a while."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


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
    for length, pairs in PAIRS.items():
        split, outside, single = list[float](), list[float](), list[float]()
        for number in range(pairs * rounds):
            if number % 2:
                single.append(local.ttft(_tokens(rng, length)))
            name = f"split-{length}-{number}"
            answer = await complete(
                session, running.url, _tokens(rng, length), model=model, max_tokens=1, temperature=0, name=name
            )
            split.append(answer.ttft)
            outside.append(answer.ttft - _in_engine(running, name, length))
            if not number % 2:
                single.append(local.ttft(_tokens(rng, length)))
        what = f"TTFT, {length:,}-token prompt, cold"
        rows.append(row(what, "mesh (split)", [1e3 * t for t in split], "ms"))
        rows.append(row(what, "mesh (split), outside the engine's steps", [1e3 * t for t in outside], "ms"))
        rows.append(row(what, "one process", [1e3 * t for t in single], "ms"))
        ratios = [a / b for a, b in zip(split, single, strict=True)]
        rows.append(row(what, "split / one process", ratios, "ratio").most(BUDGET))
        shares = [t / (t - more) for t, more in zip(split, outside, strict=True)]
        rows.append(row(what, "split / its engine's steps", shares, "ratio").most(BUDGET))
    return rows


def _in_engine(running: Mesh, name: str, length: int) -> float:
    """Seconds that prefill's engine computed for the request of that id, from the mesh's own trace of it."""
    traced = msgspec.convert(running.get(f"/trace/{name}"), Traced)
    steps = [span for span in traced.spans if span.name == "prefill chunk"]
    if sum(float(str(span.attributes["mooncake.tokens"])) for span in steps) != length:
        raise RuntimeError(f"the trace of {name} has not all of its {length} tokens' steps")
    return sum(span.end - span.start for span in steps) / 1e9


async def _decode(
    session: aiohttp.ClientSession, running: Mesh, local: OneProcess, model: str, rng: random.Random, rounds: int
) -> list[Row]:
    """Tokens/s while all of the batch decode, so that prefill does not count."""
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
            rows.append(row(f"decode, batch {batch}, context {CONTEXT}", name, rates[name], "tokens/s", mean_cpu))
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
            max_tokens=OUTPUT,
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
    run: Callable[[list[list[int]], int], list[float]],
    rng: random.Random,
    batch: int,
    rates: list[float],
    cpu: list[float],
) -> None:
    """Steady rate, too: from the first step that draws for all to the last."""
    before = cpu_seconds(os.getpid())
    ends = run([_tokens(rng, CONTEXT) for _ in range(batch)], OUTPUT)
    rates.append(batch * (len(ends) - 1) / (ends[-1] - ends[0]))
    cpu.append(cpu_seconds(os.getpid()) - before)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]
