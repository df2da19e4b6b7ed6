"""Two conductors behind one port against one, at the same load on the simulated engine; and one hot prefix on four."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.processes import MOONCAKE, Mesh, mesh
from benchmarks.report import Row, row

PREFILLS, DECODES = 4, 2
SLO_TTFT_MS, SLO_TBT_MS = 2000, 200
ENGINE = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0.01",
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": "4e-4",
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": "0",
    "MOONCAKE_SIMULATED_DECODE_BASE_S": "0.03",
    "MOONCAKE_SIMULATED_DECODE_TOKEN_S": "0",
    "MOONCAKE_HOT_RATE": "2",
}
POOL = "4MiB"
"""1,024 blocks of 32 tokens a node: decode has room for fourteen requests, so that promises count."""

PREFIX, SUFFIX, ANSWER = 2048, 256, 48
SHARED = ("--set", f"prefix_tokens={PREFIX}", "--set", f"suffix.mean={SUFFIX}", "--set", f"output.mean={ANSWER}")
EIGHT = (*SHARED, "--set", "prefixes=8", "--set", "skew=1")
ONE = (*SHARED, "--set", "prefixes=1", "--set", "skew=0")


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
def several(path: str, conductors: int) -> Iterator[Mesh]:
    """A mesh of simulated instances with so many conductors."""
    counts = ("--conductors", str(conductors), "--prefill", str(PREFILLS), "--decode", str(DECODES))
    engine = ("--engine", "simulated", "--model", path, "--context-length", "16384", "--pool-bytes", POOL)
    slos = ("--slo-ttft-ms", str(SLO_TTFT_MS), "--slo-tbt-ms", str(SLO_TBT_MS))
    os.environ.update(ENGINE)
    try:
        with mesh(*counts, *engine, *slos) as running:
            yield running
    finally:
        for name in ENGINE:
            os.environ.pop(name, None)


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


def settled(running: Mesh, conductors: int, seconds: float = 30.0) -> Served:
    """When nothing is held any more, or at the deadline."""
    deadline = time.monotonic() + seconds
    while (found := served(running, conductors)).left and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


async def load(running: Mesh, shape: tuple[str, ...], rate: float, seconds: float, salt: int) -> Any:
    """Figures of ``mooncake load``. Raises RuntimeError with what it says where it fails."""
    ends = ("--rate", str(rate), "--duration", str(seconds), "--salt", str(salt), "--seed", str(salt), "--json")
    slos = ("--slo-ttft-ms", str(SLO_TTFT_MS), "--slo-tbt-ms", str(SLO_TBT_MS))
    command = (str(MOONCAKE), "load", "--url", running.url, "--generate", "hot-prefix", *shape, *slos, *ends)
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, said = await child.communicate()
    if child.returncode:
        raise RuntimeError(f"mooncake load: {said.decode(errors='replace')[-500:]}")
    return json.loads(out)


async def measure(path: str, rounds: int, rate: float = 12.0, seconds: float = 15.0) -> list[Row]:
    """One and two conductors in turn, a mesh each round. ``rate``: requests a second of either load."""
    samples: dict[tuple[str, str], list[float]] = {}

    def note(what: str, who: str, value: float | None) -> None:
        if value is not None:
            samples.setdefault((what, who), []).append(value)

    for number in range(rounds):
        for conductors in (1, 2) if number % 2 == 0 else (2, 1):
            who = f"{conductors} conductor{'s' if conductors > 1 else ''}"
            with several(path, conductors) as running:
                for name, shape in (("8 prefixes", EIGHT), ("1 hot prefix", ONE)):
                    before = served(running, conductors)
                    figures = await load(running, shape, rate, seconds, salt=100 * number + len(name))
                    what = f"{name}, {rate:g} requests/s"
                    counts = settled(running, conductors).since(before)
                    note(f"{what}: goodput", who, figures["goodput_rps"])
                    note(f"{what}: refused with 429", who, figures["rejected"])
                    note(f"{what}: errors", who, figures["errors"])
                    note(f"{what}: over-commits", who, counts.refused)
                    note(f"{what}: hit rate by token", who, figures["hit_by_token"])
                    note(f"{what}: TTFT, median", who, figures["ttft_p50_s"])
                    note(f"{what}: prefill requests, busiest / mean", who, counts.spread)
                    note(f"{what}: held afterwards", who, counts.left)
    return [row(what, who, values, unit_of(what)) for (what, who), values in samples.items()]


def unit_of(what: str) -> str:
    units = {"goodput": "requests/s", "hit rate": "share", "TTFT": "s", "busiest": "ratio"}
    return next((unit for word, unit in units.items() if word in what), "requests")
