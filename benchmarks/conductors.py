"""Two conductors behind one port against one, on simulated instances; one hot prefix, with its keeper and without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from benchmarks import loaded
from benchmarks.processes import MOONCAKE, Mesh
from benchmarks.report import Row, Samples, row

C = TypeVar("C")

PREFILLS, DECODES = 4, 2
SLO_TTFT_MS, SLO_TBT_MS = 2000, 200
ENGINE = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0.01",
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "4e-4",
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": "0",
    "MOONCAKE_SIMULATED_DECODE_BASE_S": "0.03",
    "MOONCAKE_SIMULATED_DECODE_TOKEN_S": "0",
}
HOT_BYTES = "mooncake_conductor_hot_bytes_total"
RATE, SECONDS = 12.0, 15.0
"""Requests a second of either load, and for how long."""
POOL = "4MiB"
"""1,024 blocks of 32 tokens a node: decode has room for fourteen requests, so that promises count."""

PREFIX, SUFFIX, ANSWER = 2048, 256, 48
SHARED = ("--set", f"prefix_tokens={PREFIX}", "--set", f"suffix.mean={SUFFIX}", "--set", f"output.mean={ANSWER}")
EIGHT = (*SHARED, "--set", "prefixes=8", "--set", "skew=1")
ONE = (*SHARED, "--set", "prefixes=1", "--set", "skew=0")


@dataclass(frozen=True)
class Contender:
    """``hot_rate``: requests a second of a prefix for which the keeper has a copy made; 0: there is no keeper."""

    name: str
    conductors: int
    loads: Mapping[str, tuple[str, ...]]
    hot_rate: float = 2.0


BOTH = {"8 prefixes": EIGHT, "1 hot prefix": ONE}
CONTENDERS = (
    Contender("1 conductor", 1, BOTH),
    Contender("2 conductors", 2, BOTH),
    Contender("1 conductor, no keeper", 1, {"1 hot prefix": ONE}, hot_rate=0.0),
)


@dataclass(frozen=True)
class Served:
    """Counts of all conductors together. ``prefill``: requests by instance."""

    prefill: Counter[str]
    refused: int
    left: int

    def since(self, before: Served) -> Served:
        """``left`` is what is held now."""
        served = Counter({id: n - before.prefill[id] for id, n in self.prefill.items()})
        return Served(served, self.refused - before.refused, self.left)

    @property
    def spread(self) -> float:
        counts = list(self.prefill.values())
        return max(counts) * len(counts) / sum(counts) if sum(counts) else 0.0


@contextlib.contextmanager
def several(
    path: str, conductors: int, hot_rate: float, policy: str = "global_cache", pool: str = POOL
) -> Iterator[Mesh]:
    """A mesh of simulated instances with so many conductors."""
    counts = ("--conductors", str(conductors), "--prefill", str(PREFILLS), "--decode", str(DECODES))
    engine = ("--engine", "simulated", "--model", path, "--context-length", "16384", "--pool-bytes", pool)
    slos = ("--slo-ttft-ms", str(SLO_TTFT_MS), "--slo-tbt-ms", str(SLO_TBT_MS), "--policy", policy)
    with loaded.started({**ENGINE, "MOONCAKE_HOT_RATE": str(hot_rate)}, *counts, *engine, *slos) as running:
        yield running


def served(running: Mesh, conductors: int, seconds: float = 60.0) -> Served:
    """Asked for until every conductor has answered: the kernel chooses who does."""
    answers: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    while len(answers) < conductors:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(answers)} of {conductors} conductors answered within {seconds:g} s")
        answer = running.get("/cluster")
        answers[answer["conductor"]["id"]] = answer
    prefill: Counter[str] = Counter()
    for answer in answers.values():
        prefill.update({one["id"]: one["served"] for one in answer["instances"] if one["role"] == "prefill"})
    refused = sum(answer["requests"]["overcommitted"] for answer in answers.values())
    left = sum(answer["requests"]["running"] + answer["promises"] for answer in answers.values())
    return Served(prefill, refused, left)


def blocks(running: Mesh, bytes: float) -> float:
    """So many bytes of KV in blocks; agents tell a block's size within a heartbeat of their first engine."""
    most: int = max(1, *(agent["slot_bytes"] for agent in running.get("/cluster")["agents"]))
    return bytes / most


def settled(running: Mesh, conductors: int, seconds: float = 30.0) -> Served:
    """When nothing is held any more, or at the deadline."""
    deadline = time.monotonic() + seconds
    while (found := served(running, conductors)).left and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


async def load(running: Mesh, shape: tuple[str, ...], rate: float, seconds: float, salt: int, *more: str) -> Any:
    """Figures of ``mooncake load``; ``more`` of its flags. Raises RuntimeError with what it says where it fails."""
    ends = ("--rate", str(rate), "--duration", str(seconds), "--salt", str(salt), "--seed", str(salt), "--json")
    slos = ("--slo-ttft-ms", str(SLO_TTFT_MS), "--slo-tbt-ms", str(SLO_TBT_MS))
    command = (str(MOONCAKE), "load", "--url", running.url, "--generate", "hot-prefix", *shape, *slos, *ends, *more)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, said = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"mooncake load: {said.decode(errors='replace')[-500:]}")
    return json.loads(out)


async def measure(path: str, rounds: int, samples: Samples) -> list[Row]:
    """``samples``: of earlier runs."""
    return await alternated(CONTENDERS, partial(sample, path), rounds, samples)


async def alternated(
    contenders: Sequence[C], sample: Callable[[C, int, Samples], Awaitable[None]], rounds: int, samples: Samples
) -> list[Row]:
    """All contenders in turn, a mesh for each, the other way round every other time. ``sample`` adds what it has seen
    of one to ``samples``, which may have those of earlier runs."""
    before = max(map(len, samples.values()), default=0)
    for number in range(before, before + rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            await sample(contender, number, samples)
    return rows(samples)


async def sample(path: str, contender: Contender, number: int, samples: Samples) -> None:
    """One mesh, its loads one after the other."""
    with several(path, contender.conductors, contender.hot_rate) as running:
        for name, shape in contender.loads.items():
            salt = 100 * number + len(name)
            seen, counts = await observed(running, shape, RATE, SECONDS, salt, contender.conductors)
            seen["over-commits"] = counts.refused
            if contender.conductors > 1:
                del seen["copied by the keeper"]  # each counts its own
            add(samples, f"{name}, {RATE:g} requests/s", contender.name, seen)


async def observed(
    running: Mesh, shape: tuple[str, ...], rate: float, seconds: float, salt: int, conductors: int
) -> tuple[dict[str, float | None], Served]:
    """What a load has seen, and what the mesh counted of it."""
    before, copied = served(running, conductors), loaded.total(running, HOT_BYTES)
    figures = await load(running, shape, rate, seconds, salt)
    counts = settled(running, conductors).since(before)
    return {
        "goodput": figures["goodput_rps"],
        "refused with 429": figures["rejected"],
        "errors": figures["errors"],
        "hit rate by token": figures["hit_by_token"],
        "TTFT, median": figures["ttft_p50_s"],
        "TTFT, p99": figures["ttft_p99_s"],
        "prefill requests, busiest / mean": counts.spread,
        "copied by the keeper": blocks(running, loaded.total(running, HOT_BYTES) - copied),
        "held afterwards": counts.left,
    }, counts


def add(samples: Samples, load: str, who: str, seen: Mapping[str, float | None]) -> None:
    """What nobody could see (the TTFT where nothing was answered) is no sample."""
    for what, value in seen.items():
        if value is not None:
            samples.setdefault((f"{load}: {what}", who), []).append(value)


def rows(samples: Samples) -> list[Row]:
    """In the order in which it was seen first."""
    found = [row(what, who, values, unit_of(what)) for (what, who), values in samples.items()]
    for one, values in zip(found, samples.values(), strict=True):
        one.samples = values
    found[0].note = f"load average {os.getloadavg()[0]:.1f}"
    return found


def unit_of(what: str) -> str:
    units = {"goodput": "requests/s", "hit rate": "share", "TTFT": "s", "busiest": "ratio", "copied": "blocks"}
    return next((unit for word, unit in units.items() if word in what), "requests")
