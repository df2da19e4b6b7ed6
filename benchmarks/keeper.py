"""A hot prefix that is too long to be computed in time, on one prefill instance of four: with its keeper and without.

The prefix is computed once, by a request that may take as long. After that none can be in time at an instance that has
no copy, unless it is fetched. ``global_cache`` has it fetched for the request that needs it; ``local_cache`` never
does, and there copies come from the keeper alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.conductors import add, alternated, load, observed, several
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
    """``samples``: of earlier runs."""
    return await alternated(CONTENDERS, partial(sample, path), rounds, samples)


async def sample(path: str, contender: Contender, number: int, samples: Samples) -> None:
    """One mesh, in which one instance has the prefix."""
    with several(path, 1, contender.hot_rate, contender.policy, POOL) as running:
        await first(running, salt=1 + number)
        seen, counts = await observed(running, SHAPE, RATE, SECONDS, 1 + number, 1)
        seen["prefill instances that served"] = sum(n > 0 for n in counts.prefill.values())
        add(samples, f"{RATE:g} requests/s", contender.name, seen)


async def first(running: Mesh, salt: int) -> None:
    """The first request of the load, which may take a minute: after it one instance has the prefix."""
    patient: Sequence[str] = ("--requests", "1", "--send-slo", "--slo-ttft-ms", "60000")
    figures = await load(running, SHAPE, RATE, SECONDS, salt, *patient)
    if figures["completed"] != 1:
        raise RuntimeError(f"the prefix was not computed: {figures}")
