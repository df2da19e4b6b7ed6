"""The synthetic trace on 8+8 simulated instances by policy: TTFT, hits, moved bytes, copies (``benchmarks replay``)."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from random import Random

from benchmarks import loaded, report
from benchmarks.processes import Mesh
from benchmarks.report import Row, row
from shared.workload.arrivals import compressed
from shared.workload.trace import BLOCK, TraceRequest, read_trace, write_trace

POLICIES = ("random", "round_robin", "least_loaded", "local_cache", "paper", "global_cache")
NODES, KV_BYTES, SLOT_ALIGN = 8, 16, 4096
"""Nodes of each role; bytes of KV of a token, as simulated; what the store rounds a slot up to."""

SHORTER = 4
"""A token of the mesh stands for so many of the trace: a fourth of the messages and hashes, at the same times. What 34
processes on a few cores can do is not what is measured."""

POOL_TOKENS = 1 << 20
"""Tokens of the trace for which each node has room."""

BLOCK_TOKENS = BLOCK // SHORTER
"""Of the mesh: a block of the trace, so that neither finds more of a prefix than the other."""

POOL_BYTES = POOL_TOKENS // BLOCK * -(-BLOCK_TOKENS * KV_BYTES // SLOT_ALIGN) * SLOT_ALIGN
"""The store begins every slot at a page."""

CHUNK = 16_384
"""Tokens of the trace computed in one step."""

A800 = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0.01",
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": str(1.16e-4 * SHORTER),
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": str(7.2e-10 * SHORTER**2),
    "MOONCAKE_PREFILL_CHUNK": str(CHUNK // SHORTER),
}
"""LLaMA3-70B on 8 A800, as fitted to the paper's Fig. 14; decode steps as the simulated engine's defaults."""

RANKS = (1, 10, 100, 1000, 10_000)

Seen = dict[tuple[str, str], float | None]
"""(what, unit) -> value."""
Samples = dict[str, list[Seen]]
"""Policy -> what was seen of it, one of each round."""


def thinned(requests: Iterable[TraceRequest], share: float, seed: int) -> list[TraceRequest]:
    """Whole families of requests: those whose prompts begin alike stay together, or go together, so that what is left
    shares as much as before."""
    kept = dict[int, bool]()
    draw = Random(f"thinned/{seed}").random
    return [request for request in requests if kept.setdefault(request.hash_ids[0], draw() < share)]


def workload(path: str, share: float, rate: float, count: int, longest_answer: int) -> list[TraceRequest]:
    """The first ``count`` of a share of the trace, ``rate`` a second; answers are cut."""
    every = thinned(read_trace(path), share, 0)[:count]
    factor = (every[-1].arrival - every[0].arrival) * rate / (len(every) - 1)
    longest = longest_answer * SHORTER
    cut = (r._replace(output_tokens=min(longest, max(1, r.output_tokens) * SHORTER)) for r in every)
    return list(compressed(cut, factor))


def measure(policy: str, trace: str) -> Seen:
    """One policy on a mesh of its own."""
    flags = ["--engine", "simulated", "--prefill", str(NODES), "--decode", str(NODES), "--context-length", "200000"]
    flags += ["--pool-bytes", str(POOL_BYTES), "--block-size", str(BLOCK_TOKENS)]
    flags += ["--slo-tbt-ms", "60000", "--policy", policy]
    with loaded.started({**A800, "OMP_NUM_THREADS": "1"}, *flags) as running:
        before = running.cpu()
        usual = ("--trace", trace, "--no-spread", "--shorten", str(SHORTER))
        found = loaded.load(running, *usual, "--slo-ttft-ms", "30000", "--slo-tbt-ms", "300")
        cpu = (running.cpu() - before) / max(1, found["requests"])
        return {**_of_load(found), **_of_mesh(running), ("CPU of all processes, a request", "s"): cpu}


def _of_load(found: dict[str, float | None]) -> Seen:
    counts = {(what, "requests"): found[what] for what in ("requests", "completed", "rejected", "errors")}
    times = {(f"TTFT {point}", "s"): found[f"ttft_{point}_s"] for point in ("mean", "p50", "p90", "p99")}
    return {
        **times,
        ("hit by token", "share"): found["hit_by_token"],
        ("hit by token of an endless cache in one place", "share"): found["hit_possible"],
        ("effective (30 s, 300 ms)", "share"): found["effective"],
        **counts,
        ("generator late p99", "s"): found["late_p99_s"],
    }


def _of_mesh(running: Mesh) -> Seen:
    fetched = loaded.total(running, "mooncake_store_transfer_bytes_total", direction="in")
    streamed = loaded.total(running, "mooncake_store_transfer_bytes_total", direction="out")
    held = loaded.copies(running, "prefill")
    ranks = {(f"copies of the block of rank {rank}", "nodes"): held[rank - 1] for rank in RANKS if rank <= len(held)}
    return {
        ("fetched between nodes", "M tokens"): fetched / KV_BYTES * SHORTER / 1e6,
        ("streamed to decode", "M tokens"): streamed / KV_BYTES * SHORTER / 1e6,
        ("copies of a block on prefill nodes, mean", "nodes"): sum(held) / max(1, len(held)),
        **ranks,
        ("busiest prefill node over mean", "ratio"): running.get("/cluster")["balance"]["prefill"]["ratio"],
    }


def rows(samples: Samples) -> list[Row]:
    """What was seen of each policy in each round, as medians."""
    found = [
        row(what, policy, [value for one in seen if (value := one.get((what, unit))) is not None], unit)
        for policy, seen in samples.items()
        for what, unit in seen[0]
    ]
    found[0].note = f"load average {os.getloadavg()[0]:.1f}"
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks replay", description=__doc__)
    parser.add_argument("--trace", default="../shared/traces/synthetic_trace.jsonl")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of them, with commas (default: all)")
    parser.add_argument("--share", type=float, default=0.125, help="of the trace's families (default 0.125)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second (default 8)")
    parser.add_argument("--requests", type=int, default=400, help="(default 400)")
    parser.add_argument("--answer", type=int, default=16, help="longest answer, tokens (default 16)")
    parser.add_argument("--rounds", type=int, default=1, help="samples of each policy, in turn (default 1)")
    parser.add_argument("--name", default="replay", help="of the file of results")
    options = parser.parse_args(arguments)
    requests = workload(options.trace, options.share, options.rate, options.requests, options.answer)
    samples: Samples = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.jsonl")
        write_trace(path, requests)
        for _ in range(options.rounds):
            for policy in options.policies.split(","):
                samples.setdefault(policy, []).append(measure(policy, path))
    report.write(options.name, rows(samples))
