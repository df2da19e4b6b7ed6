"""The simulator beside a live mesh of the simulated engine: one trace, one latency model (``benchmarks fidelity``)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import loaded, report
from benchmarks.processes import MOONCAKE, Mesh
from benchmarks.replay import A800, BLOCK_TOKENS, CHUNK, KV_BYTES, POOL_BYTES, POOL_TOKENS, SHORTER, workload
from benchmarks.report import Row, row
from shared.workload.trace import TraceRequest, write_trace

LIKE = 0.1
"""How far the simulator may be from the mesh."""

HELD = {"ttft_mean_s": "s", "ttft_p90_s": "s", "hit_by_token": "share"}
"""Figures that are held to that, and their units."""

CONTROL_S = 0.001
"""A message's way, where nobody has probed."""

LONGEST = 1 << 16
"""Tokens: a single prompt of half a minute would decide the figures of a trace of a minute."""

BESIDE = {"ttft_p50_s": "s", "tbt_p50_s": "s", "rejected": "requests"}

DECODE = (0.012, 5e-5, 2e-8)
"""Seconds of a decode step, as the simulated engine's defaults: any, for each sequence, for each token of the mesh."""

PROBES, PROBE_TOKENS, PROBE_ANSWER = 10, 512, 11
"""Requests, one a second, to an idle mesh, and their lengths there: what its host adds to the engine's models."""


class Host(NamedTuple):
    """Seconds that a mesh takes beside its engine's models, for one request alone: to the first token, from there to
    the first decode step, and in each step."""

    request: float = 0.0
    handover: float = 0.0
    step: float = 0.0


NO_HOST = Host()


def host_of(probes: Sequence[dict[str, Any]]) -> Host:
    """Of records of ``mooncake load``. The longest gap has the handover in it, the others are steps."""
    base, token, square = (float(A800[f"MOONCAKE_SIMULATED_PREFILL_{name}_S"]) for name in ("BASE", "TOKEN", "SQUARE"))
    prompt = base + token * PROBE_TOKENS + square * PROBE_TOKENS**2
    gaps = PROBE_ANSWER - 1
    ttft, worst, mean = (statistics.median(float(one[name]) for one in probes) for name in ("ttft", "tbt", "mean_gap"))
    longer = max((worst - mean) * gaps / (gaps - 1), 0.0)
    any_step, sequence, attended = DECODE
    return Host(ttft - prompt, longer, mean - longer / gaps - any_step - sequence - attended * PROBE_TOKENS)


def probed(running: Mesh, folder: Path) -> Host:
    """The mesh is idle."""
    fixed = [f"--set={name}.mean={tokens}" for name, tokens in (("input", PROBE_TOKENS), ("output", PROBE_ANSWER))]
    fixed += ["--set=input.variation=0", "--set=output.variation=0", "--set=rate=1", "--salt", "77"]
    records = folder / "probes.jsonl"
    loaded.load(running, "--generate", "random", *fixed, "--requests", str(PROBES), "--records", str(records))
    return host_of([json.loads(line) for line in records.read_text().splitlines()])


def on_mesh(trace: str, folder: Path, prefill: int, decode: int, policy: str) -> tuple[Host, dict[str, Any]]:
    """What ``mooncake load`` says of a mesh of its own, probed before."""
    flags = mesh_flags(prefill, decode, policy)
    flags += ["--slo-ttft-ms", "600000", "--slo-tbt-ms", "60000"]
    with loaded.started({**A800, **decode_model(), "OMP_NUM_THREADS": "1"}, *flags) as running:
        host = probed(running, folder)
        return host, loaded.load(running, "--trace", trace, "--no-spread", "--shorten", str(SHORTER))


def mesh_flags(prefill: int, decode: int, policy: str) -> list[str]:
    """Of ``mooncake up``: what :func:`cluster` describes."""
    flags = ["--engine", "simulated", "--prefill", str(prefill), "--decode", str(decode), "--context-length", "200000"]
    return [*flags, "--pool-bytes", str(POOL_BYTES), "--block-size", str(BLOCK_TOKENS), "--policy", policy]


def simulated(trace: str, folder: Path, host: Host, prefill: int, decode: int, policy: str) -> dict[str, Any]:
    """What ``mooncake simulate`` says of the same."""
    config = folder / "cluster.json"
    config.write_text(json.dumps(cluster(host)))
    command = [str(MOONCAKE), "simulate", "--trace", trace, "--ticks", "--json", "--config", str(config)]
    command += ["--prefill", str(prefill), "--decode", str(decode), "--policy", policy]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cluster(host: Host = NO_HOST) -> dict[str, Any]:
    """The mesh as the simulator's settings have it. A token here is one of the trace, of which the mesh's stand for
    several; KV is next to nothing on both sides."""
    step, sequence, token = DECODE
    return {
        "hardware": {
            "prefill": {
                "base": float(A800["MOONCAKE_SIMULATED_PREFILL_BASE_S"]),
                "linear": float(A800["MOONCAKE_SIMULATED_PREFILL_TOKEN_S"]) / SHORTER,
                "square": float(A800["MOONCAKE_SIMULATED_PREFILL_SQUARE_S"]) / SHORTER**2,
            },
            "decode": {"base": step + host.step, "per_sequence": sequence, "per_token": token / SHORTER},
            "bytes_per_token": KV_BYTES // SHORTER,
            "nic": 1e9,
            "hbm": POOL_TOKENS,
            "dram": POOL_TOKENS,
        },
        "chunk": CHUNK,
        "control_delay": max(host.request, CONTROL_S),
        "handover": host.handover,
    }


def decode_model() -> dict[str, str]:
    """Variables of the simulated engine."""
    names = ("BASE", "SEQUENCE", "TOKEN")
    return {f"MOONCAKE_SIMULATED_DECODE_{name}_S": str(value) for name, value in zip(names, DECODE, strict=True)}


def compared(lives: Sequence[dict[str, Any]], simulators: dict[str, dict[str, Any]]) -> list[Row]:
    """Each figure of the mesh, and each simulator's beside it with its distance from the mesh's median. The last
    simulator is the one that is held to it."""
    first, rows = lives[0], list[Row]()
    late = max(one["late_p99_s"] for one in lives)
    measured = f"{first['completed']} of {first['requests']} answered, generator late p99 {late:.3f} s"
    for what, unit in (HELD | BESIDE).items():
        live = row(what, "mesh", [float(found[what] or 0) for found in lives], unit, note=measured)
        rows.append(live)
        for name, ours in simulators.items():
            rows.append(Row(what, name, float(ours[what]), unit, 1))
            if live.value:
                away = float(ours[what]) / live.value - 1
                rows.append(Row(f"{what}, {name} against mesh", "difference", abs(away), "share", note=f"{away:+.1%}"))
                if what in HELD and ours is list(simulators.values())[-1]:
                    rows[-1].most(LIKE)
        measured = ""
    return rows


def cut(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """As many output tokens as the mesh draws."""
    return [one._replace(output_tokens=-(-one.output_tokens // SHORTER)) for one in requests]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fidelity", description=__doc__)
    parser.add_argument("--trace", default="../shared/traces/synthetic_trace.jsonl")
    parser.add_argument("--policy", default="global_cache", help="(default global_cache)")
    parser.add_argument("--nodes", type=int, default=3, help="of each role (default 3)")
    parser.add_argument("--share", type=float, default=0.03, help="of the trace's families (default 0.03)")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second (default 1.5)")
    parser.add_argument("--requests", type=int, default=120, help="(default 120)")
    parser.add_argument("--answer", type=int, default=16, help="longest answer, tokens of the mesh (default 16)")
    parser.add_argument("--rounds", type=int, default=1, help="of the mesh (default 1)")
    parser.add_argument("--samples", help="file that rounds are added to; all of its rounds count")
    parser.add_argument("--name", default="fidelity", help="of the file of results")
    options = parser.parse_args(arguments)
    requests = [
        one
        for one in workload(options.trace, options.share, options.rate, options.requests, options.answer)
        if one.input_tokens <= LONGEST
    ]
    size = (options.nodes, options.nodes, options.policy)
    with tempfile.TemporaryDirectory() as folder:
        whole, short = Path(folder) / "trace.jsonl", Path(folder) / "cut.jsonl"
        write_trace(whole, requests)
        write_trace(short, cut(requests))
        samples = Path(options.samples or Path(folder) / "samples.jsonl")
        with samples.open("a") as out:
            for _ in range(options.rounds):
                out.write(json.dumps(on_mesh(str(whole), Path(folder), *size)) + "\n")
        hosts, lives = zip(*map(json.loads, samples.read_text().splitlines()), strict=True)
        host = Host(*map(statistics.median, zip(*hosts, strict=True)))
        alone, with_host = (simulated(str(short), Path(folder), one, *size) for one in (NO_HOST, host))
    rows = compared(lives, {"simulator, engine alone": alone, "simulator": with_host})
    rows += [Row(f"the host's time, {what}", "mesh", one, "s", len(lives)) for what, one in host._asdict().items()]
    rows[0].note += f"; load average {os.getloadavg()[0]:.1f}"
    report.write(options.name, rows)
