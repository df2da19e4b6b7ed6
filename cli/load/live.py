"""A load while it runs: what was sent and came back so far, on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence

from rich.live import Live
from rich.text import Text

from cli.console import err
from cli.load.outcome import End, Outcome
from cli.load.report import Objective
from cli.load.run import Load
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
    progress = Progress(objective)
    while True:
        progress.count(load.ended)
        live.update(Text(progress.line(len(load.outcomes), load.total, load.clock())))
        await asyncio.sleep(EVERY_S)


class Progress:
    """What has become of the requests so far. Each is looked at once, so that a long load is not slowed by its end."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._ends: Counter[End] = Counter()
        self._counted = self._good = 0
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in ("TTFT", "TBT")}

    def count(self, ended: Sequence[Outcome]) -> None:
        """``ended``: all so far, those of the last call first and in the same order."""
        new = ended[self._counted :]
        self._counted += len(new)
        self._ends.update(outcome.end for outcome in new)
        self._good += sum(outcome.meets(self._objective.ttft, self._objective.tbt) for outcome in new)
        self._recent["TTFT"].extend(outcome.ttft for outcome in new if outcome.ttft is not None)
        self._recent["TBT"].extend(outcome.tbt for outcome in new if outcome.tbt is not None)

    def line(self, sent: int, total: int, now: float) -> str:
        """``12.5 s  40/100 sent  8 running  30 answered  2 refused  0 errors  97 % within objectives  TTFT 0.2 s``."""
        ends, ended = self._ends, self._counted
        parts = [f"{now:.1f} s", f"{sent}/{total} sent", f"{sent - ended} running"]
        parts += [f"{ends[End.OK]} answered", f"{ends[End.REJECTED]} refused", f"{ends[End.ERROR]} errors"]
        parts += [f"{100 * self._good / ended:.0f} % within objectives"] if ended else []
        parts += [f"{name} {quantile(sorted(v), 0.5):.3g} s" for name, v in self._recent.items() if v]
        return "  ".join(parts)
