"""A load while it runs: what was sent and came back so far, on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from rich.live import Live
from rich.text import Text

from cli.console import err
from cli.load_outcome import End, Outcome
from cli.load_report import Objective
from cli.load_run import Load
from shared.workload.measures import quantile

EVERY_S = 0.5
RECENT = 200
"""Answers whose times are shown: what happens now, not what has happened."""


@contextlib.asynccontextmanager
async def watched(load: Load, objective: Objective) -> AsyncIterator[None]:
    """Shows the load on stderr, where that is a terminal."""
    if not err.is_terminal:
        yield
        return
    with Live(console=err, refresh_per_second=4, transient=True) as live:
        task = asyncio.create_task(_show(live, load, objective))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _show(live: Live, load: Load, objective: Objective) -> None:
    while True:
        live.update(Text(line(load.outcomes, load.total, load.clock(), objective)))
        await asyncio.sleep(EVERY_S)


def line(outcomes: list[Outcome], total: int, now: float, objective: Objective) -> str:
    """``12.5 s  40/100 sent  8 running  30 answered  2 refused  0 errors  97 % within objectives  TTFT 0.20 s``."""
    ends = Counter(outcome.end for outcome in outcomes)
    ended = len(outcomes) - ends[End.UNFINISHED]
    good = sum(outcome.meets(objective.ttft, objective.tbt) for outcome in outcomes)
    parts = [f"{now:.1f} s", f"{len(outcomes)}/{total} sent", f"{ends[End.UNFINISHED]} running"]
    parts += [f"{ends[End.OK]} answered", f"{ends[End.REJECTED]} refused", f"{ends[End.ERROR]} errors"]
    parts += [f"{100 * good / ended:.0f} % within objectives"] if ended else []
    for name, values in _recent(outcomes).items():
        parts += [f"{name} {quantile(sorted(values), 0.5):.3g} s"] if values else []
    return "  ".join(parts)


def _recent(outcomes: list[Outcome]) -> dict[str, list[float]]:
    some = outcomes[-RECENT:]
    ttfts = [outcome.ttft for outcome in some if outcome.ttft is not None]
    return {"TTFT": ttfts, "TBT": [outcome.tbt for outcome in some if outcome.tbt is not None]}
