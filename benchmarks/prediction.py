"""Predicted against actual TTFT and TBT of a live mesh, real model and simulated (``benchmarks prediction``)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from benchmarks import loaded, report
from benchmarks.report import Row

RATIOS = {
    "TTFT": "mooncake_conductor_ttft_prediction_ratio",
    "TBT (worst tenth)": "mooncake_conductor_tbt_prediction_ratio",
    "mean step": "mooncake_conductor_step_prediction_ratio",
}
BANDS = ((0.9, 1.1), (0.75, 1.25), (0.5, 2.0))
GENEROUS = ("--slo-ttft-ms", "600000", "--slo-tbt-ms", "60000")

ENGINES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "simulated": (
        ("--engine", "simulated", "--context-length", "200000", "--prefill", "2", "--decode", "2"),
        ("--generate", "chat", "--rate", "2", "--set", "output.mean=64", "--set", "think_s=5"),
    ),
    "transformers": (
        ("--prefill", "1", "--decode", "1"),
        ("--generate", "chat", "--rate", "0.5", "--shorten", "16", "--set", "think_s=10"),
    ),
}
"""What ``mooncake up`` and ``mooncake load`` are told."""


def quantile(counted: Sequence[tuple[float, float]], share: float) -> float | None:
    """Of a histogram, as Prometheus estimates it: evenly within a bucket. None without observations."""
    whole = counted[-1][1] if counted else 0.0
    low, below = 0.0, 0.0
    for bound, upto in counted:
        if whole and upto >= share * whole:
            return (
                low if bound == float("inf") else low + (bound - low) * (share * whole - below) / max(upto - below, 1)
            )
        low, below = bound, upto
    return None


def within(counted: Sequence[tuple[float, float]], low: float, high: float) -> float | None:
    """Share of observations above ``low`` and up to ``high``, which are bounds of buckets."""
    upto = dict(counted)
    whole = counted[-1][1] if counted else 0.0
    return (upto[high] - upto[low]) / whole if whole else None


def measure(engine: str, seconds: float) -> list[Row]:
    flags, workload = ENGINES[engine]
    with loaded.started({"OMP_NUM_THREADS": "1"}, *flags, *GENEROUS) as running:
        found = loaded.load(running, *workload, "--duration", str(seconds))
        rows = list[Row]()
        for what, name in RATIOS.items():
            counted = loaded.buckets(running, name)
            count = int(counted[-1][1]) if counted else 0
            quartiles = [cut for share in (0.25, 0.75) if (cut := quantile(counted, share)) is not None]
            shares = ", ".join(f"{low:g}…{high:g}: {within(counted, low, high) or 0:.2f}" for low, high in BANDS)
            note = f"shares {shares}; p10 {quantile(counted, 0.1) or 0:.2f}, p90 {quantile(counted, 0.9) or 0:.2f}"
            median = quantile(counted, 0.5)
            rows.append(Row(f"{what}, actual over predicted", engine, median, "", count, quartiles, note=note))
        measured = (
            f"{found['completed']} of {found['requests']} answered, generator late p99 {found['late_p99_s']:.3f} s"
        )
        rows.append(Row("TTFT", engine, found["ttft_p50_s"], "s", int(found["completed"]), note=measured))
        rows.append(Row("TBT (worst tenth)", engine, found["tbt_p50_s"], "s", int(found["completed"])))
        return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks prediction", description=__doc__)
    parser.add_argument("--engines", default=",".join(ENGINES), help="of them, with commas (default: both)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of arrivals (default 45)")
    parser.add_argument("--name", default="prediction", help="of the file of results")
    options = parser.parse_args(arguments)
    rows = [row for engine in options.engines.split(",") for row in measure(engine, options.seconds)]
    rows[0].note += f"; load average {os.getloadavg()[0]:.1f}"
    report.write(options.name, rows)
