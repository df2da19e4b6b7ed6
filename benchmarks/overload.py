"""Overload: 1, 2, 5 and 10 times what a mesh of the simulated engine can do, from clients who obey ``Retry-After``.

Two prefill instances of 2.5 prompts a second each are what is short. Goodput counts answers that met both objectives.

What is judged is the conductor, so ten times the load must be a rate that two cores can carry, mesh and clients and
all. With prompts of 0.2 s and an objective of 2 s it is not: at 100 requests a second they took both cores whole, and
what was late was late for that. So time is stretched, of the engines and of the objective alike: queues are as deep,
and requests half as many. How much of the machine was in use stands beside every load.
"""

from __future__ import annotations

import asyncio
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
PROMPT_S = 0.4
"""Seconds of prefill that each prompt takes, whatever its length: so it is known what the mesh can do."""
CAPACITY = PREFILLS / PROMPT_S
TTFT_S, TBT_S = 4.0, 0.2
WORDS, TOKENS = 400, 16
WARM_S, DRAIN_S = 6.0, 6.0
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
    """``cpu_s``: CPU seconds of the conductor. ``busy``: share of all processors that was in use while the load lasted,
    by whomever."""

    load: int
    result: Result
    cpu_s: float
    busy: float

    @property
    def refused(self) -> int:
        return self.result.first_refused + self.result.again_refused


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
    return [found for one in samples for found in rows(one, seconds, samples[0])]


async def sample(path: str, model: str, load: int, seconds: float) -> Sample:
    with overloaded(path) as running:
        children = psutil.Process(running.pid).children(recursive=True)
        conductor = next(c for c in children if "services.conductor" in c.cmdline())
        await in_child(Job(running.url, model, CAPACITY / 2, 2.0, 2.0, WORDS, TOKENS, TTFT_S, TBT_S))
        before = sum(conductor.cpu_times()[:2])
        job = Job(running.url, model, load * CAPACITY, seconds, DRAIN_S, WORDS, TOKENS, TTFT_S, TBT_S, seed=load)
        meter = asyncio.create_task(busy(seconds))
        result = await in_child(job)
        return Sample(load, result, sum(conductor.cpu_times()[:2]) - before, await meter)


async def busy(seconds: float) -> float:
    """Share of all processors that is in use during the next ``seconds``."""
    psutil.cpu_percent()
    await asyncio.sleep(seconds)
    return psutil.cpu_percent() / 100


def goodput(result: Result, seconds: float) -> float:
    """Answers a second, once the queues have filled and as long as the load lasts."""
    return sum(WARM_S <= at < seconds for at in result.met) / (seconds - WARM_S)


def cpu_of_a_refusal(sample: Sample, base: Sample) -> float | None:
    """CPU milliseconds of the conductor: what a higher load costs beyond the lowest, which has as much accepted."""
    more = sample.refused - base.refused
    return 1e3 * (sample.cpu_s - base.cpu_s) / more if more > 0 else None


def rows(sample: Sample, seconds: float, lowest: Sample) -> list[Row]:
    result, who, base = sample.result, f"{sample.load}x", goodput(lowest.result, seconds)
    useful, asked = goodput(result, seconds), result.first + result.again
    missed = sum(result.missed.values())
    note = ", ".join(f"{n} × {why}" for why, n in {**result.reasons, **result.missed, **result.errors}.items())
    share = useful / base if base else 0.0
    ms = sorted(1e3 * took for took in result.refused_s)
    last = statistics.quantiles(ms, n=100, method="inclusive")[98] if len(ms) > 1 else None
    quick = (last or 0.0) < LONGEST_429_MS
    return [
        Row(GOODPUT, who, useful, "requests/s", result.accepted, cpu_s=sample.cpu_s, note=note),
        Row(f"{GOODPUT}, of that at 1x", who, share, "", budget=LEAST_GOODPUT, met=share >= LEAST_GOODPUT),
        Row(f"{GOODPUT}, of what prefill can do", who, useful / CAPACITY, ""),
        Row("share of 429", who, sample.refused / max(asked, 1), "", asked),
        row("latency of a 429", who, ms, "ms"),
        Row("latency of a 429, 99 %", who, last, "ms", len(ms), budget=LONGEST_429_MS, met=quick),
        Row("conductor's CPU for a 429", who, cpu_of_a_refusal(sample, lowest), "ms", sample.refused),
        Row("accepted ones that met their objectives", who, len(result.met) / max(len(result.met) + missed, 1), ""),
        Row("returns accepted", who, accepted_again(result), "", result.again),
        row("Retry-After", who, result.told_s, "s"),
        row("TTFT of accepted ones", who, [1e3 * took for took in result.ttft], "ms"),
        Row("processors in use", who, sample.busy, "", note=f"of {psutil.cpu_count()}"),
        Row("errors", who, sum(result.errors.values()), "requests", asked),
    ]


def accepted_again(result: Result) -> float | None:
    return 1 - result.again_refused / result.again if result.again else None
