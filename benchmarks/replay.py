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
from benchmarks.report import Row
from shared.workload.arrivals import compressed
from shared.workload.trace import TraceRequest, read_trace, write_trace

POLICIES = ("random", "least_loaded", "local_cache", "paper", "global_cache")
NODES, KV_BYTES = 8, 16
"""Nodes of each role; bytes of KV of a token, as simulated."""

SHORTER = 4
"""A token of the mesh stands for so many of the trace: a fourth of the messages and hashes, at the same times. What 34
processes on a few cores can do is not what is measured."""

POOL_TOKENS = 1 << 20
"""Tokens of the trace for which each node has room."""

A800 = {
    "MOONCAKE_SIMULATED_PREFILL_BASE_S": "0.01",
    "MOONCAKE_SIMULATED_PREFILL_TOKEN_S": str(1.16e-4 * SHORTER),
    "MOONCAKE_SIMULATED_PREFILL_SQUARE_S": str(7.2e-10 * SHORTER**2),
    "MOONCAKE_PREFILL_CHUNK": "4096",
}
"""LLaMA3-70B on 8 A800, as fitted to the paper's Fig. 14; decode steps as the simulated engine's defaults."""

RANKS = (1, 10, 100, 1000, 10_000)


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


def measure(policy: str, trace: str) -> list[Row]:
    """One policy on a mesh of its own."""
    flags = ["--engine", "simulated", "--prefill", str(NODES), "--decode", str(NODES), "--context-length", "200000"]
    flags += ["--pool-bytes", str(POOL_TOKENS // SHORTER * KV_BYTES), "--slo-tbt-ms", "60000", "--policy", policy]
    with loaded.started({**A800, "OMP_NUM_THREADS": "1"}, *flags) as running:
        before = running.cpu()
        usual = ("--trace", trace, "--no-spread", "--shorten", str(SHORTER))
        found = loaded.load(running, *usual, "--slo-ttft-ms", "30000", "--slo-tbt-ms", "300")
        cpu = (running.cpu() - before) / max(1, found["requests"])
        return [*_of_load(policy, found, cpu), *_of_mesh(policy, running)]


def _of_load(policy: str, found: dict[str, float | None], cpu: float) -> list[Row]:
    left = f"{found['rejected']} refused, {found['errors']} errors"
    note = (
        f"{found['completed']} of {found['requests']} answered, {left}, generator late p99 {found['late_p99_s']:.3f} s"
    )
    rows = [
        Row(f"TTFT {point}", policy, found[f"ttft_{point}_s"], "s", int(found["completed"] or 0), cpu_s=cpu, note=note)
        for point in ("mean", "p50", "p90", "p99")
    ]
    possible = f"an endless cache in one place: {found['hit_possible']:.3f}"
    rows.append(Row("hit by token", policy, found["hit_by_token"], "", note=possible))
    return [*rows, Row("effective (30 s, 300 ms)", policy, found["effective"], "share")]


def _of_mesh(policy: str, running: Mesh) -> list[Row]:
    fetched = loaded.total(running, "mooncake_store_transfer_bytes_total", direction="in")
    streamed = loaded.total(running, "mooncake_store_transfer_bytes_total", direction="out")
    held = loaded.copies(running, "prefill")
    ranks = ", ".join(f"{rank}: {held[rank - 1]}" for rank in RANKS if rank <= len(held))
    balance = running.get("/cluster")["balance"]["prefill"]["ratio"]
    return [
        Row("fetched between nodes", policy, fetched / KV_BYTES * SHORTER / 1e6, "M tokens"),
        Row("streamed to decode", policy, streamed / KV_BYTES * SHORTER / 1e6, "M tokens"),
        Row(
            "copies of a block on prefill nodes", policy, sum(held) / max(1, len(held)), "mean", note=f"by rank {ranks}"
        ),
        Row("busiest prefill node over mean", policy, balance, ""),
    ]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks replay", description=__doc__)
    parser.add_argument("--trace", default="../shared/traces/synthetic_trace.jsonl")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of them, with commas (default: all)")
    parser.add_argument("--share", type=float, default=0.125, help="of the trace's families (default 0.125)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second (default 8)")
    parser.add_argument("--requests", type=int, default=400, help="(default 400)")
    parser.add_argument("--answer", type=int, default=16, help="longest answer, tokens (default 16)")
    parser.add_argument("--name", default="replay", help="of the file of results")
    options = parser.parse_args(arguments)
    requests = workload(options.trace, options.share, options.rate, options.requests, options.answer)
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.jsonl")
        write_trace(path, requests)
        for policy in options.policies.split(","):
            rows += measure(policy, path)
    rows[0].note += f"; load average {os.getloadavg()[0]:.1f}"
    report.write(options.name, rows)
