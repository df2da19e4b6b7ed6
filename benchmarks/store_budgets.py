"""Cases of ``make bench-store``, their samples, and the budgets that they are held against. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Row, row

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Case:
    """One call moves ``count`` blocks of ``size`` bytes; ``tasks`` calls at one time."""

    suite: str
    op: str
    size: int
    count: int = 1
    tasks: int = 1

    @property
    def bytes(self) -> int:
        return self.size * self.count * self.tasks

    @property
    def label(self) -> str:
        if self.tasks > 1:
            return f"{self.op} {sized(self.bytes)} in {self.tasks} calls of {sized(self.size)} blocks"
        return f"{self.op} {sized(self.size)}" + (f" x {self.count}" if self.count > 1 else "")


def sized(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count} B"


TRANSFERS = [
    Case("transfers", op, size, count)
    for size, count in ((128 * KIB, 1), (MIB, 1), (4 * MIB, 1), (16 * MIB, 1), (16 * KIB, 256))
    for op in ("read", "write")
]
PAPER = [Case("paper", "read", 128 * KIB, size // (64 * 128 * KIB), 64) for size in (8 * MIB, 64 * MIB, 256 * MIB, GIB)]
"""The shape of the paper's figure 12: concurrency 64, granularity 128 KiB, rising sizes."""
STORE = [
    Case("store", op, size, count)
    for size, count in ((128 * KIB, 1), (MIB, 1), (4 * MIB, 1), (16 * MIB, 1), (128 * KIB, 32), (MIB, 32))
    for op in ("put", "get")
]
SUITES = {"transfers": TRANSFERS, "paper": PAPER, "store": STORE}


@dataclass
class Cell:
    """What one contender did in one case: a number of each round. ``seconds``: median of the round's calls; ``late``:
    their 99th percentile; ``cpu``: CPU seconds a call of all processes. ``why``: it was not run, or broke."""

    rounds: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    why: str = ""

    def speeds(self, case: Case) -> list[float]:
        """GiB/s."""
        return [case.bytes / GIB / s for s in self.seconds]


Table = dict[Case, dict[str, Cell]]


@dataclass(frozen=True)
class Budget:
    """``ours`` is at least ``least`` times as fast as ``theirs`` in every case that ``applies``."""

    text: str
    ours: str
    theirs: str
    least: float
    applies: Callable[[Case], bool]


def _large(case: Case) -> bool:
    return case.suite == "transfers" and case.size >= MIB


def _single(case: Case) -> bool:
    return case.suite == "transfers" and case.count == 1


def _many(case: Case) -> bool:
    return case.suite == "transfers" and case.count > 1


def _stored(case: Case) -> bool:
    return case.suite == "store"


def _got(case: Case) -> bool:
    return case.suite == "store" and case.op == "get"


OURS_NEAR, OURS_BYTES = "ours, own node, into buffers", "ours, own node, bytes"
OURS_TCP, OURS_SHM = "ours, other node over tcp", "ours, other node over shm"
UPSTREAM, UPSTREAM_BYTES = "upstream, registered buffers", "upstream, bytes"

BUDGETS = (
    Budget("tcp >= 90 % of a raw socket", "tcp", "raw socket", 0.9, _large),
    Budget("shm >= 80 % of memcpy", "shm", "memcpy", 0.8, _large),
    Budget("tcp >= 2 x upstream", "tcp", "upstream tcp", 2.0, _single),
    Budget("tcp >= 5 x upstream, many small blocks", "tcp", "upstream tcp", 5.0, _many),
    Budget("tcp >= NIXL", "tcp", "NIXL tcp", 1.0, lambda case: case.suite == "transfers"),
    Budget("shm >= NIXL", "shm", "NIXL shm", 1.0, lambda case: case.suite == "transfers"),
    Budget("store >= 1.5 x upstream", OURS_NEAR, UPSTREAM, 1.5, _stored),
    Budget("store >= 1.5 x upstream", OURS_BYTES, UPSTREAM_BYTES, 1.5, _stored),
    Budget("store >= 1.5 x upstream, verified", OURS_TCP, UPSTREAM, 1.5, _got),
    Budget("store >= 1.5 x upstream, verified", OURS_SHM, UPSTREAM, 1.5, _got),
)


def speed_rows(table: Table) -> list[Row]:
    """A row for each case and contender; cpu_s is of one call."""
    rows = []
    for case, cells in table.items():
        for name, cell in cells.items():
            rows.append(_speed(case, name, cell))
    return rows


def _speed(case: Case, name: str, cell: Cell) -> Row:
    what = f"{case.suite}: {case.label}"
    if not cell.seconds:
        return row(what, name, [], "GiB/s", note=cell.why)
    cpu, late = median(cell.cpu), median(cell.late)
    note = f"{cpu * GIB / case.bytes:.2f} CPU s/GiB, call {median(cell.seconds) * 1e6:.0f} us, p99 {late * 1e6:.0f} us"
    return row(what, name, cell.speeds(case), "GiB/s", cpu, note + (f"; {cell.why}" if cell.why else ""))


def budget_rows(table: Table) -> list[Row]:
    """A row for each budget and case: the ratio of the two in one round, over the rounds that both ran."""
    return [
        _held(budget, case, cells)
        for budget in BUDGETS
        for case, cells in table.items()
        if budget.applies(case) and budget.ours in cells and budget.theirs in cells
    ]


def _held(budget: Budget, case: Case, cells: dict[str, Cell]) -> Row:
    ours, theirs = cells[budget.ours], cells[budget.theirs]
    slow = dict(zip(theirs.rounds, theirs.seconds, strict=True))
    ratios = [slow[turn] / s for turn, s in zip(ours.rounds, ours.seconds, strict=True) if turn in slow]
    what, pair = f"budget, {budget.text}: {case.label}", f"{budget.ours} / {budget.theirs}"
    held = row(what, pair, ratios, "x", note=ours.why or theirs.why)
    held.budget = budget.least
    if held.value is not None:
        held.met = held.value >= budget.least
    return held


def median(numbers: Sequence[float]) -> float:
    """Of at least one."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
