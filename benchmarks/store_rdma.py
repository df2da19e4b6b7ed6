"""RDMA beside Debian's ``ib_write_bw``, in a guest that has RDMA devices in software."""

from __future__ import annotations

from pathlib import Path

from benchmarks import report

BUDGETS = (
    ("rdma >= 90 % of ib_write_bw", "rdma / ib_write_bw", "x"),
    ("rdma <= 10 us of user CPU per work request", "rdma", "us"),
)


def measure(logs: Path) -> list[report.Row]:
    why = "not run: the transport is not part of this build"
    return [report.row(f"budget, {what}", pair, [], unit, note=why) for what, pair, unit in BUDGETS]
