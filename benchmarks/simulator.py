"""CPU time and peak memory of the simulator by size of cluster and trace (``benchmarks simulator``)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.processes import in_module
from benchmarks.report import Row

RATE = 0.2
"""Requests a second and node: the paper's conversation trace on sixteen nodes."""

BUDGET_S = 60.0
"""Of the smallest case, on one core."""


class Case(NamedTuple):
    requests: int
    nodes: int

    @property
    def name(self) -> str:
        return f"{self.requests:,} requests, {self.nodes:,} nodes"


CASES = {"small": Case(12_000, 16), "medium": Case(100_000, 128), "large": Case(1_000_000, 1000)}


def replay(requests: int, nodes: int) -> dict[str, Any]:
    """Multi-turn chat on as many prefill as decode nodes. The trace is made while it is replayed."""
    from shared.workload.generators import Chat, chat
    from simulator.report import report as figures
    from simulator.runs import run

    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = islice(chat(Chat(rate=RATE * nodes)), requests)
    found = figures(run({"prefill": nodes // 2, "decode": nodes // 2}, trace, progress))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cpu_s": time.process_time() - began, "peak_mib": peak / 1024, "bare_mib": before / 1024, **found}


def progress(arrived: int) -> None:
    """A line that is written over, where somebody looks."""
    if sys.stderr.isatty():
        print(f"\r{arrived:,}", end="", file=sys.stderr, flush=True)


def rows_of(case: Case, found: dict[str, Any]) -> list[Row]:
    shown = f"TTFT {found['ttft_mean_s']:.3f} s in the mean, {found['ttft_p90_s']:.3f} s at p90"
    shown += f"; hit {found['hit_by_token']:.3f}; {found['rejected']} refused"
    note = f"{shown}; load average {os.getloadavg()[0]:.1f}"
    whole = Row("CPU time", case.name, found["cpu_s"], "s", 1, note=note)
    return [
        whole.most(BUDGET_S) if case == CASES["small"] else whole,
        Row("CPU time of a request", case.name, 1000 * found["cpu_s"] / case.requests, "ms", case.requests),
        Row("peak memory", case.name, found["peak_mib"], "MiB", 1, note=f"{found['bare_mib']:.0f} before the run"),
    ]


async def measure(cases: Sequence[Case], name: str) -> None:
    """What is done is written after each case; what the file has of other cases stays."""
    for case in cases:
        found = rows_of(case, await in_module("benchmarks.simulator", case._asdict()))
        report.save(name, report.merged(report.known(name), found))
    report.write(name, report.known(name))


def case_of(text: str) -> Case:
    """A name, or requests/nodes. Raises ValueError."""
    if text in CASES:
        return CASES[text]
    requests, _, nodes = text.partition("/")
    case = Case(int(requests), int(nodes))
    if case.requests < 1 or case.nodes < 2 or case.nodes % 2:
        raise ValueError(f"{text}: at least one request, and an even number of nodes")
    return case


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulator", description=__doc__)
    help = f"of {', '.join(CASES)}, or requests/nodes as 20000/1000 (default: small and medium)"
    parser.add_argument("cases", nargs="*", type=case_of, default=[CASES["small"], CASES["medium"]], help=help)
    parser.add_argument("--name", default="simulator", help="of the file of results")
    options = parser.parse_args(arguments)
    asyncio.run(measure(options.cases, options.name))


if __name__ == "__main__":
    print(json.dumps(replay(**json.load(sys.stdin))))
