"""``python -m simulator.figures``: compute, draw, write the page. Figures not asked for keep their data."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import MooncakeError
from shared.workload.arrivals import spread
from shared.workload.trace import TraceRequest, read_trace
from simulator.figures import (
    assumptions,
    bandwidth,
    beyond,
    capacity,
    effective,
    overload,
    policies,
    pool,
    ratio,
    stages,
)
from simulator.figures.page import page, stem
from simulator.trace_stats import trace_stats

FIGURES = (
    *effective.FIGURES[:1],
    policies.FIGURE,
    *effective.FIGURES[1:],
    effective.PREFILL_TIME,
    capacity.FIGURE,
    pool.FIGURE,
    pool.REPLICAS,
    bandwidth.FIGURE,
    stages.FIGURE,
    ratio.FIGURE,
    assumptions.FIGURE,
    beyond.FIGURE,
    overload.FIGURE,
)
FILES = {
    "conversation": ("conversation_trace.jsonl", "conversation_trace_first_half.jsonl"),
    "toolagent": ("toolagent_trace.jsonl",),
    "synthetic": ("synthetic_trace.jsonl",),
}
"""As they are published; the first that is there."""


def read_traces(folder: Path) -> dict[str, list[TraceRequest]]:
    """Raises MooncakeError for a file that is no trace."""
    found = {name: [folder / file for file in files if (folder / file).exists()] for name, files in FILES.items()}
    return {name: list(spread(read_trace(paths[0]))) for name, paths in found.items() if paths}


def stats_row(trace: Sequence[TraceRequest]) -> list[Any]:
    stats = trace_stats(trace, [math.inf])
    means = [f"{stats.input_mean:,.0f}", f"{stats.output_mean:,.0f}", f"{stats.rate:.2f}"]
    return [stats.requests, *means, f"{stats.lru[math.inf]:.4f}"]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(only: str) -> list[str]:
    return [name.strip() for name in only.split(",")] if only else [one.name for one in FIGURES]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator.figures", description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder of the published traces")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder to write to")
    parser.add_argument("--only", default="", help="as 5,13,beyond")
    parser.add_argument("--draw", action="store_true", help="draw and write anew, compute nothing")
    options = parser.parse_args()
    try:
        traces = read_traces(options.traces)
    except MooncakeError as error:
        say(str(error))
        return 2
    if not traces:
        say(f"{options.traces} has none of {', '.join(file for files in FILES.values() for file in files)}")
        return 2
    folder = options.docs / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / "data.json"
    data: dict[str, dict[str, Any]] = json.loads(store.read_text()) if store.exists() else {}
    if not options.draw:
        compute(chosen(options.only), traces, data, store)
    for one in FIGURES:
        if one.name in data:
            one.draw(data[one.name], folder / f"{stem(one)}.png")
    stats = {name: stats_row(trace) for name, trace in traces.items()}
    (options.docs / "evaluation.md").write_text(page(FIGURES, data, stats))
    return 0


def compute(
    names: Sequence[str], traces: Mapping[str, list[TraceRequest]], data: dict[str, dict[str, Any]], store: Path
) -> None:
    """What was computed is kept after every figure."""
    for one in FIGURES:
        if one.name in names and all(name in traces for name in one.needs):
            began = time.process_time()
            data[one.name] = one.compute(traces, data)
            store.write_text(json.dumps(data, indent=1))
            say(f"figure {one.name}: {time.process_time() - began:.0f} s of CPU")


if __name__ == "__main__":
    sys.exit(main())
