"""Rows of a benchmark: what, contender, value (median), unit, n, quartiles, CPU seconds; a table and a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass
class Row:
    """One line of a result. ``value`` is the median of ``n`` samples (None: not run, ``note`` says why); ``cpu_s`` is
    CPU seconds per sample of all processes of the contender, where it was taken. ``budget``: the least (or the most)
    that ``value`` should be, and whether it is (``met``). ``samples``: where later runs add to them."""

    what: str
    contender: str
    value: float | None
    unit: str
    n: int = 0
    quartiles: list[float] = field(default_factory=list)
    cpu_s: float | None = None
    note: str = ""
    budget: float | None = None
    met: bool | None = None
    samples: list[float] | None = None

    def least(self, budget: float) -> Row:
        """``value`` should be no less."""
        self.budget, self.met = budget, self.value is not None and self.value >= budget
        return self

    def most(self, budget: float) -> Row:
        """``value`` should be no more."""
        self.budget, self.met = budget, self.value is not None and self.value <= budget
        return self


def row(
    what: str, contender: str, samples: Sequence[float], unit: str, cpu_s: float | None = None, note: str = ""
) -> Row:
    """Median and quartiles of the samples."""
    if not samples:
        return Row(what, contender, None, unit, note=note or "not run")
    cuts = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Row(what, contender, statistics.median(samples), unit, len(samples), [cuts[0], cuts[2]], cpu_s, note)


Samples = dict[tuple[str, str], list[float]]
"""(what, contender) -> one of each round."""


def earlier(name: str) -> Samples:
    """What runs before this one have seen, where they kept it: a long measurement may be made in pieces."""
    path = RESULTS / f"{name}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(r["what"], r["contender"]): list(r["samples"]) for r in rows if "samples" in r}


def save(name: str, rows: Sequence[Row]) -> None:
    """Write ``benchmarks/results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    document = {
        "benchmark": name,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "processor": _processor(),
            "python": platform.python_version(),
            "argv": sys.argv[1:],
            "load": [round(load, 2) for load in os.getloadavg()],
        },
        "rows": [_bare(r) for r in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def known(name: str) -> list[Row]:
    """Rows of the file of results as it is; none where there is no file."""
    path = RESULTS / f"{name}.json"
    return [Row(**fields) for fields in json.loads(path.read_text())["rows"]] if path.exists() else []


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """``new`` instead of rows of the same kind, and behind those of others."""
    measured = {(one.what, one.contender) for one in new}
    return [*(one for one in old if (one.what, one.contender) not in measured), *new]


def merge(name: str, rows: Sequence[Row]) -> None:
    """As :func:`write`; rows of the file that were not measured again stay."""
    write(name, merged(known(name), rows))


def write(name: str, rows: Sequence[Row]) -> None:
    """Print the table and write ``benchmarks/results/<name>.json``."""
    save(name, rows)
    table = Table(title=name, title_justify="left")
    for column in ("what", "contender", "median", "unit", "n", "quartiles", "cpu s", "note"):
        table.add_column(column, overflow="fold")
    for r in rows:
        value = "not run" if r.value is None else f"{r.value:.4g}"
        quartiles = " … ".join(f"{q:.4g}" for q in r.quartiles)
        cpu = "" if r.cpu_s is None else f"{r.cpu_s:.3g}"
        note = r.note if r.budget is None else f"{r.note} ({'kept' if r.met else 'missed'}: {r.budget:g})".strip()
        table.add_row(r.what, r.contender, value, r.unit, str(r.n), quartiles, cpu, note)
    Console(width=150).print(table)


def _bare(r: Row) -> dict[str, object]:
    """Without the budget and the samples where there are none."""
    optional = ("budget", "met", "samples")
    return {name: value for name, value in asdict(r).items() if name not in optional or value is not None}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
