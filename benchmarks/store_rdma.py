"""RDMA beside Debian's ``ib_write_bw``, in a guest that has RDMA devices in software."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import LIBRARIES, Missing, unpacked
from benchmarks.peers.lines import ROOT
from benchmarks.report import Row, row
from benchmarks.store_budgets import sized

GUEST = Path(os.environ.get("RDMA_VM", ROOT.parent / "shared/tools/rdma-vm"))
PACKAGES = ("perftest", "libibumad3", "libpci3", "librdmacm1", "libibverbs1", "libnl-3-200", "libnl-route-3-200")
SPEED, CPU = 0.9, 10.0
ROUNDS, PULLS = 3, 5
LIMIT = 590


def measure() -> list[Row]:
    try:
        found = in_guest()
        cases = [line for case in found["cases"] for line in rows_of(case)]
        cables = [line for case in found["cables"] for line in rows_of_cable(case)]
        return [*cases, row_of_work(found["work"]), *cables]
    except Missing as e:
        return [_not_run(f"rdma >= {SPEED:.0%} of ib_write_bw", str(e)), _not_run(f"rdma <= {CPU:g} us", str(e))]


def _not_run(what: str, why: str) -> Row:
    return Row(f"budget, {what}", "rdma / ib_write_bw", None, "x", note=f"not run: {why}", budget=SPEED)


def in_guest() -> dict[str, Any]:
    """What :mod:`benchmarks.peers.rdma_guest` printed. Raises Missing."""
    if importlib.util.find_spec("services.store.transfer.rdma") is None:
        raise Missing("this build has no RDMA transport")
    if not os.access(GUEST, os.X_OK):
        raise Missing(f"there is no {GUEST.name} (RDMA_VM=PATH names what starts a guest with RDMA devices)")
    libraries = os.pathsep.join(unpacked(*PACKAGES))
    counts = [str(ROUNDS), str(PULLS)]
    inside = [sys.executable, "-m", "benchmarks.peers.rdma_guest", str(LIBRARIES / "usr/bin/ib_write_bw"), *counts]
    env = [f"--env=LD_LIBRARY_PATH={libraries}", f"--env=PYTHONPATH={ROOT}"]
    flags = ["--nics", "4", "--memory", "2048", "--timeout", str(LIMIT), "--dir", str(ROOT), *env]
    done = subprocess.run([str(GUEST), *flags, "--", *inside], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise Missing(f"the guest ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rows_of(case: dict[str, Any]) -> list[Row]:
    """Speeds of both, their ratio round by round, and CPU for each request."""
    what = f"write {sized(case['size'])} x {case['count']}"
    ours, theirs = [one["speed"] for one in case["ours"]], case["perftest"]
    shares = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratios = row(f"budget, rdma >= 90 % of ib_write_bw: {what}", "rdma / ib_write_bw", shares, "x")
    ratios.budget, ratios.met = SPEED, (ratios.value or 0) >= SPEED
    each = [one["cpu"] * 1e3 / case["count"] for one in case["ours"]]
    cpu = row(
        f"rdma: CPU of a request: {what}", "rdma", each, "ms", note="user and system, with the software NIC's copies"
    )
    speeds = [row(f"rdma: {what}", name, s, "MiB/s") for name, s in (("rdma", ours), ("ib_write_bw", theirs))]
    return [ratios, cpu, *speeds]


def row_of_work(seconds: Sequence[float]) -> Row:
    """What is ours of a work request."""
    note = "post, poll and account; without the system calls in which the software NIC works"
    found = row("budget, user time of a work request <= 10 us", "rdma", [1e6 * s for s in seconds], "us", note=note)
    found.budget, found.met = CPU, found.value is not None and found.value <= CPU
    return found


def rows_of_cable(case: dict[str, Any]) -> list[Row]:
    """Seconds of a transfer without and with a cable pulled in the middle, and what is lost, pair by pair."""
    what = f"rdma: {case['op']} {sized(case['size'])} over 2 NICs at each end"
    lost = [pulled - plain for plain, pulled in zip(case["plain"], case["pulled"], strict=True)]
    return [
        row(what, "no cable pulled", case["plain"], "s"),
        row(what, "a cable pulled in the middle", case["pulled"], "s"),
        row(what, "lost by it", lost, "s", note="each against the transfer right before it"),
    ]
