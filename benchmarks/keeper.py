"""A hot prefix that is too long to be computed in time, on one prefill instance of four: with its keeper and without.

The prefix is computed once, by a request that may take as long. After that none can be in time at an instance that has
no copy, unless it is fetched. ``global_cache`` has it fetched for the request that needs it; ``local_cache`` never
does, and there copies come from the keeper alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import loaded
from benchmarks.conductors import HOT_BYTES, blocks, load, rows, served, settled, several
from benchmarks.processes import Mesh
from benchmarks.report import Row, Samples

RATE, SECONDS = 18.0, 20.0
"""Requests a second, twice what one instance computes with the prefix at hand; and for how long."""
PREFIX, SUFFIX, ANSWER = 8192, 256, 16
"""Tokens: 3.3 s without the prefix, where 2 are allowed, and 0.11 s with it."""
POOL = "64MiB"
SHAPE = (
    *("--set", f"prefix_tokens={PREFIX}", "--set", f"suffix.mean={SUFFIX}", "--set", "suffix.most=1024"),
    *("--set", f"output.mean={ANSWER}", "--set", "prefixes=1", "--set", "skew=0"),
)


@dataclass(frozen=True)
class Contender:
    """``hot_rate``: requests a second for which the keeper has a copy made; 0: there is no keeper."""

    policy: str
    hot_rate: float

    @property
    def name(self) -> str:
        return f"{self.policy}, {'keeper' if self.hot_rate else 'no keeper'}"


CONTENDERS = tuple(Contender(policy, rate) for policy in ("local_cache", "global_cache") for rate in (2.0, 0.0))


async def measure(path: str, rounds: int, samples: Samples) -> list[Row]:
    """All contenders in turn, a mesh for each, the other way round every other time. ``samples``: of earlier runs."""
    before = max(map(len, samples.values()), default=0)
    for number in range(before, before + rounds):
        for contender in CONTENDERS if number % 2 == 0 else reversed(CONTENDERS):
            await sample(path, contender, number, samples)
    return rows(samples)


async def sample(path: str, contender: Contender, number: int, samples: Samples) -> None:
    """One mesh, in which one instance has the prefix; what was seen is added to ``samples``."""
    with several(path, 1, contender.hot_rate, contender.policy, POOL) as running:
        await first(running, salt=1 + number)
        before, copied = served(running, 1), loaded.total(running, HOT_BYTES)
        figures = await load(running, SHAPE, RATE, SECONDS, 1 + number)
        counts = settled(running, 1).since(before)
        seen = {
            "goodput": figures["goodput_rps"],
            "refused with 429": figures["rejected"],
            "errors": figures["errors"],
            "hit rate by token": figures["hit_by_token"],
            "TTFT, median": figures["ttft_p50_s"],
            "TTFT, p99": figures["ttft_p99_s"],
            "prefill requests, busiest / mean": counts.spread,
            "prefill instances that served": sum(n > 0 for n in counts.prefill.values()),
            "copied by the keeper": blocks(running, loaded.total(running, HOT_BYTES) - copied),
            "held afterwards": counts.left,
        }
        for what, value in seen.items():
            if value is not None:
                samples.setdefault((f"{RATE:g} requests/s: {what}", contender.name), []).append(value)


async def first(running: Mesh, salt: int) -> None:
    """The first request of the load, which may take a minute: after it one instance has the prefix."""
    patient: Sequence[str] = ("--requests", "1", "--send-slo", "--slo-ttft-ms", "60000")
    figures = await load(running, SHAPE, RATE, SECONDS, salt, *patient)
    if figures["completed"] != 1:
        raise RuntimeError(f"the prefix was not computed: {figures}")
