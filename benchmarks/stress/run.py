"""One run of the stress program, from nothing over faults to nothing, and what it has found."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.stress import leaks
from benchmarks.stress.board import Count
from benchmarks.stress.faults import Faults
from benchmarks.stress.fleet import Fleet, Options
from shared.errors import MooncakeError

TICK = 0.05
REPORT = 10.0
STARTED = 120.0
"""Seconds until every client must have done something."""

CALM = 2.0
"""Seconds without faults before everything is stopped."""

Tell = Callable[[str], None]


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Outcome:
    """What one run has found; the lists say it in words. ``bytes`` were read and checked."""

    ops: int = 0
    bytes: int = 0
    errors: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.ops > 0 and not (self.mismatches or self.leaks or self.crashes)

    def line(self) -> str:
        counts = f"faults={sum(self.faults.values())} mismatches={len(self.mismatches)} leaks={len(self.leaks)}"
        return f"stress: ops={self.ops} bytes={self.bytes} {counts}"


def stress(options: Options, seconds: float, interval: float, tell: Tell = to_stderr) -> Outcome:
    """``seconds`` of work with a fault about every ``interval`` seconds. Starting, and looking at what is left, come on
    top, with deadlines of their own."""
    outcome = Outcome()
    with Fleet(options) as fleet:
        faults = Faults(fleet, interval, random.Random(options.seed))
        try:
            _wait_for_work(fleet)
            _run(fleet, faults, seconds, tell)
        finally:
            faults.end()
        time.sleep(CALM)
        outcome.faults = dict(faults.kinds)
        _look(fleet, outcome)
    outcome.leaks += leaks.left_over(fleet)
    return outcome


def _wait_for_work(fleet: Fleet) -> None:
    """Raises TimeoutError with what the idle ones have logged."""
    deadline = time.monotonic() + STARTED
    rows = range(len(fleet.clients))
    while idle := [row for row in rows if not fleet.board.of(row, Count.OPS)]:
        if time.monotonic() > deadline:
            logs = [fleet.clients[row].log.read_text(errors="replace")[-500:] for row in idle]
            raise TimeoutError(f"{len(idle)} clients did nothing within {STARTED:g} s: {logs}")
        time.sleep(TICK)


def _run(fleet: Fleet, faults: Faults, seconds: float, tell: Tell) -> None:
    begin = time.monotonic()
    report = begin + REPORT
    while (now := time.monotonic()) < begin + seconds:
        faults.tick()
        if now >= report:
            report += REPORT
            tell(f"{now - begin:.0f} s: {_progress(fleet)} faults={faults.total}")
        time.sleep(TICK)


def _progress(fleet: Fleet) -> str:
    return " ".join(f"{count.name.lower()}={fleet.board.total(count)}" for count in Count)


def _look(fleet: Fleet, outcome: Outcome) -> None:
    """Clients end, agents must let go of everything, every block is read once more, agents end."""
    fleet.stop(fleet.clients)
    outcome.leaks += asyncio.run(leaks.held(fleet))
    try:
        corrupt, lost = asyncio.run(leaks.stored(fleet))
    except MooncakeError as error:
        corrupt, lost = [], [f"the store cannot be read: {error.message}"]
    outcome.leaks += lost
    outcome.leaks += fleet.stop(fleet.agents)
    board = fleet.board
    outcome.ops, outcome.bytes, outcome.errors = (board.total(c) for c in (Count.OPS, Count.BYTES, Count.ERRORS))
    said = fleet.mismatches()
    outcome.mismatches = said + ["a mismatch without words"] * (board.total(Count.MISMATCHES) - len(said)) + corrupt
    outcome.crashes = [crash for process in fleet.processes for crash in process.crashes]
