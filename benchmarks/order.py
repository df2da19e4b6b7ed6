"""Short prompts first, and thrifty admission, on a live mesh near saturation and simulated (``benchmarks order``)."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import loaded, report
from benchmarks.fidelity import LONGEST, cluster, cut, decode_model, mesh_flags
from benchmarks.replay import A800, SHORTER, workload
from benchmarks.report import Row
from shared.workload.measures import quantile
from shared.workload.trace import TraceRequest, read_trace, write_trace

VARIANTS = {
    "as it is": (0.0, 0.0),
    "overtake 4": (4.0, 0.0),
    "thrift 10": (0.0, 10.0),
    "both": (4.0, 10.0),
}
"""(``queue_overtake``, ``admission_thrift``)."""

TTFT_S, TBT_S = 20.0, 0.3
POLICY = "global_cache"


class Served(NamedTuple):
    """Seconds; ``ttft`` None: refused. ``tbt`` is 0 where there was one token."""

    tokens: int
    ttft: float | None
    tbt: float = 0.0

    @property
    def good(self) -> bool:
        return self.ttft is not None and self.ttft <= TTFT_S and self.tbt <= TBT_S


def on_mesh(trace: str, folder: Path, nodes: int, variant: str) -> list[Served]:
    """What each request got of a mesh of its own. Raises RuntimeError where one failed."""
    overtake, thrift = VARIANTS[variant]
    env = {**A800, **decode_model(), "OMP_NUM_THREADS": "1"}
    env |= {"MOONCAKE_QUEUE_OVERTAKE": str(overtake), "MOONCAKE_ADMISSION_THRIFT": str(thrift)}
    records = folder / "records.jsonl"
    slo = ["--slo-ttft-ms", str(round(1000 * TTFT_S))]
    with loaded.started(env, *mesh_flags(nodes, nodes, POLICY), *slo, "--slo-tbt-ms", "60000") as running:
        usual = ("--trace", trace, "--no-spread", "--shorten", str(SHORTER), "--records", str(records))
        found = loaded.load(running, *usual, *slo, "--slo-tbt-ms", str(round(1000 * TBT_S)))
    if found["errors"] or found["unfinished"]:
        raise RuntimeError(f"{variant}: {found['errors_by_kind']}, {found['unfinished']} without an end")
    return [_served(json.loads(line)) for line in records.read_text().splitlines()]


def _served(record: dict[str, Any]) -> Served:
    return Served(record["input_tokens"], record["ttft"], record["tbt"] or 0.0)


def simulated(trace: Iterable[TraceRequest], nodes: int, variant: str) -> list[Served]:
    """The same of the simulator."""
    from simulator.runs import run

    overtake, thrift = VARIANTS[variant]
    settings = cluster() | {"prefill": nodes, "decode": nodes, "policy": POLICY, "ttft_slo": TTFT_S}
    done = run(settings | {"overtake": overtake, "thrift": thrift}, trace)
    return [Served(one.trace.input_tokens, one.ttft if one.ended == "done" else None, one.tbt) for one in done]


def figures(served: Sequence[Served]) -> dict[tuple[str, str], float]:
    """(what, unit) -> value. The longest tenth is of all requests, refused ones too: its bound is the same for all."""
    known = sorted(one.ttft for one in served if one.ttft is not None)
    bound = sorted(one.tokens for one in served)[-math.ceil(len(served) / 10)]
    longest = [one for one in served if one.tokens >= bound]
    long_known = sorted(one.ttft for one in longest if one.ttft is not None)
    return {
        ("TTFT mean", "s"): statistics.fmean(known),
        ("TTFT p50", "s"): quantile(known, 0.5),
        ("TTFT p90", "s"): quantile(known, 0.9),
        ("TTFT p99", "s"): quantile(known, 0.99),
        ("TTFT of the longest tenth, mean", "s"): statistics.fmean(long_known) if long_known else math.nan,
        ("TTFT of the longest tenth, p99", "s"): quantile(long_known, 0.99) if long_known else math.nan,
        (f"effective ({TTFT_S:g} s, {1000 * TBT_S:g} ms)", "share"): sum(one.good for one in served) / len(served),
        ("refused", "requests"): sum(one.ttft is None for one in served),
        ("refused of the longest tenth", "requests"): sum(one.ttft is None for one in longest),
    }


def rows(name: str, live: Sequence[Served], ours: Sequence[Served]) -> list[Row]:
    """``name``: trace and variant."""
    note = f"{len(live)} requests; load average {os.getloadavg()[0]:.1f}"
    both = [("mesh", live, note)] if live else []
    return [
        Row(what, f"{name}, {where}", value, unit, 1, note=said)
        for where, served, said in [*both, ("simulator", ours, "")]
        for (what, unit), value in figures(served).items()
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks order", description=__doc__)
    parser.add_argument("--traces", default="../shared/traces", help="folder of NAME_trace*.jsonl")
    parser.add_argument("cases", nargs="+", metavar="TRACE=VARIANT,…", help=f"variants: {', '.join(VARIANTS)}")
    parser.add_argument("--nodes", type=int, default=4, help="of each role (default 4)")
    parser.add_argument("--share", type=float, default=1.0, help="of the trace's families (default 1)")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second (default 5)")
    parser.add_argument("--requests", type=int, default=300, help="(default 300)")
    parser.add_argument("--answer", type=int, default=16, help="longest answer, tokens of the mesh (default 16)")
    parser.add_argument("--simulate-only", action="store_true", help="no mesh")
    parser.add_argument("--name", default="order", help="of the file of results; rows of other cases stay")
    options = parser.parse_args(arguments)
    found = list[Row]()
    for case in options.cases:
        trace, _, variants = case.partition("=")
        path = next(Path(options.traces).glob(f"{trace}_trace*.jsonl"))
        every = workload(str(path), options.share, options.rate, options.requests, options.answer)
        for variant in variants.split(","):
            found += measured(trace, [one for one in every if one.input_tokens <= LONGEST], variant, options)
    report.merge(options.name, found)


def measured(name: str, requests: Sequence[TraceRequest], variant: str, options: argparse.Namespace) -> list[Row]:
    """One variant, live and simulated, of the same file."""
    with tempfile.TemporaryDirectory() as folder:
        whole, short = Path(folder) / "trace.jsonl", Path(folder) / "cut.jsonl"
        write_trace(whole, requests)
        write_trace(short, cut(requests))
        ours = simulated(list(read_trace(short)), options.nodes, variant)
        live = [] if options.simulate_only else on_mesh(str(whole), Path(folder), options.nodes, variant)
    return rows(f"{name}, {variant}", live, ours)
