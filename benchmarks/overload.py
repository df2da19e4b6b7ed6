"""Overload: 1, 2, 5 and 10 times what a mesh of the simulated engine can do, from clients who obey ``Retry-After``.

Two prefill instances of five prompts a second each are what is short. Goodput counts answers that met both objectives.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from benchmarks.overload_client import Job, Result, in_child
from benchmarks.processes import Mesh, mesh
from benchmarks.report import Row, row

LOADS = (1, 2, 5, 10)
PREFILLS, DECODES = 2, 2
PROMPT_S = 0.2
"""Seconds of prefill that each prompt takes, whatever its length: so it is known what the mesh can do."""
CAPACITY = PREFILLS / PROMPT_S
TTFT_S, TBT_S = 2.0, 0.2
WORDS, TOKENS = 400, 16
WARM_S, DRAIN_S = 3.0, 8.0
SETTINGS = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": str(PROMPT_S),
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "0",
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": "0",
    "MOONCAKE_PREFILL_CHUNK": "4096",
}
GOODPUT = "goodput"
LEAST_GOODPUT, LONGEST_429_MS = 0.95, 50.0


@dataclass
class Sample:
    load: int
    result: Result
    cpu_s: float


@contextlib.contextmanager
def overloaded(path: str) -> Iterator[Mesh]:
    slos = ("--slo-ttft-ms", str(round(TTFT_S * 1000)), "--slo-tbt-ms", str(round(TBT_S * 1000)))
    size = ("--prefill", str(PREFILLS), "--decode", str(DECODES), "--pool-bytes", "256MiB", "--block-size", "32")
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    try:
        with mesh("--model", path, "--engine", "simulated", "--context-length", "8192", *size, *slos) as running:
            yield running
    finally:
        os.environ.clear()
        os.environ.update(before)


async def measure(path: str, model: str, seconds: float) -> list[Row]:
    """``seconds`` of each load, each on a mesh of its own. ``path``: folder of the model, served as ``model``."""
    samples = [await sample(path, model, load, seconds) for load in LOADS]
    base = goodput(samples[0].result, seconds)
    return [found for one in samples for found in rows(one, seconds, base)]


async def sample(path: str, model: str, load: int, seconds: float) -> Sample:
    with overloaded(path) as running:
        children = psutil.Process(running.pid).children(recursive=True)
        conductor = next(c for c in children if "services.conductor" in c.cmdline())
        await in_child(Job(running.url, model, CAPACITY / 2, 2.0, 2.0, WORDS, TOKENS, TTFT_S, TBT_S))
        before = sum(conductor.cpu_times()[:2])
        job = Job(running.url, model, load * CAPACITY, seconds, DRAIN_S, WORDS, TOKENS, TTFT_S, TBT_S, seed=load)
        result = await in_child(job)
        return Sample(load, result, sum(conductor.cpu_times()[:2]) - before)


def goodput(result: Result, seconds: float) -> float:
    """Answers a second, once the queues have filled and as long as the load lasts."""
    return sum(WARM_S <= at < seconds for at in result.met) / (seconds - WARM_S)


def rows(sample: Sample, seconds: float, base: float) -> list[Row]:
    result, who = sample.result, f"{sample.load}x"
    useful, asked = goodput(result, seconds), result.first + result.again
    refused = result.first_refused + result.again_refused
    missed = sum(result.missed.values())
    note = ", ".join(f"{n} × {why}" for why, n in {**result.reasons, **result.missed, **result.errors}.items())
    share = useful / base if base else 0.0
    ms = sorted(1e3 * took for took in result.refused_s)
    last = statistics.quantiles(ms, n=100, method="inclusive")[98] if len(ms) > 1 else None
    quick = (last or 0.0) < LONGEST_429_MS
    return [
        Row(GOODPUT, who, useful, "requests/s", result.accepted, cpu_s=sample.cpu_s, note=note),
        Row(f"{GOODPUT}, of that at 1x", who, share, "", budget=LEAST_GOODPUT, met=share >= LEAST_GOODPUT),
        Row("share of 429", who, refused / max(asked, 1), "", asked),
        row("latency of a 429", who, ms, "ms"),
        Row("latency of a 429, 99 %", who, last, "ms", len(ms), budget=LONGEST_429_MS, met=quick),
        Row("accepted ones that met their objectives", who, len(result.met) / max(len(result.met) + missed, 1), ""),
        Row("returns accepted", who, accepted_again(result), "", result.again),
        row("Retry-After", who, result.told_s, "s"),
        row("TTFT of accepted ones", who, [1e3 * took for took in result.ttft], "ms"),
        Row("errors", who, sum(result.errors.values()), "requests", asked),
    ]


def accepted_again(result: Result) -> float | None:
    return 1 - result.again_refused / result.again if result.again else None
