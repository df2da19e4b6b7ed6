"""Clients who obey ``Retry-After``: Poisson arrivals, each prompt another one. A child, with a job as JSON on stdin."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import aiohttp

from benchmarks.processes import in_module

WORDS = ("river", "stone", "cloud", "amber", "lantern", "meadow", "copper", "winter", "harbor", "violet", "engine")


@dataclass
class Job:
    """``rate`` requests a second for ``seconds``; who was refused comes again, for ``drain`` seconds beyond that.
    ``words``: of each prompt. Objectives in seconds."""

    url: str
    model: str
    rate: float
    seconds: float
    drain: float
    words: int
    max_tokens: int
    ttft: float
    tbt: float
    seed: int = 1


@dataclass
class Result:
    """Times in seconds. ``first``, ``again``: requests that had not been refused before, and returns; of each how many
    were refused with 429. ``refused_s``: from the request to a 429. ``met``: when answers that met both objectives were
    complete, since the start; ``missed``: which objective others missed."""

    first: int = 0
    first_refused: int = 0
    again: int = 0
    again_refused: int = 0
    accepted: int = 0
    met: list[float] = field(default_factory=list)
    missed: dict[str, int] = field(default_factory=dict)
    refused_s: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)


def count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


class Load:
    def __init__(self, job: Job, session: aiohttp.ClientSession) -> None:
        self.job, self.session, self.result = job, session, Result()
        self.began = time.perf_counter()

    async def run(self) -> Result:
        rng, tasks, at = random.Random(self.job.seed), [], 0.0
        while (at := at + rng.expovariate(self.job.rate)) < self.job.seconds:
            await asyncio.sleep(self.began + at - time.perf_counter())
            prompt = " ".join(rng.choices(WORDS, k=self.job.words))
            tasks.append(asyncio.create_task(self.client(prompt)))
        rest = self.began + self.job.seconds + self.job.drain - time.perf_counter()
        _, pending = await asyncio.wait(tasks, timeout=max(rest, 0.1))
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.result

    async def client(self, prompt: str) -> None:
        """Asks until it is served."""
        retry = await self.ask(prompt, again=False)
        while retry:
            await asyncio.sleep(retry)
            retry = await self.ask(prompt, again=True)

    async def ask(self, prompt: str, again: bool) -> float:
        """Seconds after which to ask again, 0 where that is of no use."""
        job, result, began = self.job, self.result, time.perf_counter()
        body = {"model": job.model, "prompt": prompt, "max_tokens": job.max_tokens, "stream": True, "ignore_eos": True}
        try:
            async with self.session.post(job.url + "/v1/completions", json=body) as response:
                result.again += again
                result.first += not again
                if response.status == 200:
                    result.accepted += 1
                    await self.read(response, began)
                    return 0.0
                error = (await response.json())["error"]
                if response.status == 429:
                    result.refused_s.append(time.perf_counter() - began)
                    result.again_refused += again
                    result.first_refused += not again
                    count(result.reasons, error["reason"])
                    result.told_s.append(float(response.headers["Retry-After"]))
                    return result.told_s[-1]
                count(result.errors, f"{response.status} {error['code']}")
        except (aiohttp.ClientError, TimeoutError) as e:
            count(result.errors, type(e).__name__)
        return 0.0

    async def read(self, response: aiohttp.ClientResponse, began: float) -> None:
        times = []
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                if b'"error"' in line:
                    return count(self.result.errors, "error event")
        self.result.ttft.append(times[0] - began)
        gaps = sorted((b - a for a, b in pairwise(times)), reverse=True)
        worst = gaps[: math.ceil(len(gaps) / 10)]
        if times[0] - began > self.job.ttft:
            return count(self.result.missed, "ttft")
        if worst and sum(worst) / len(worst) > self.job.tbt:
            return count(self.result.missed, "tbt")
        self.result.met.append(times[-1] - self.began)
        return None


async def run(job: Job) -> Result:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        return await Load(job, session).run()


async def in_child(job: Job) -> Result:
    """Run the job in a process of its own."""
    return Result(**await in_module("benchmarks.overload_client", asdict(job)))


if __name__ == "__main__":
    json.dump(asdict(asyncio.run(run(Job(**json.load(sys.stdin))))), sys.stdout)
