"""Fig. 13: mean TTFT by the bandwidth of a node, synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.figures.figure import PAPER_CLUSTER, Figure, Known, Traces, markdown
from simulator.plots import COLOURS, PAPER, figure, from_zero, logarithmic
from simulator.report import report
from simulator.runs import run
from simulator.settings import GBPS

RATES = (24, 40, 60, 80, 100, 160, 320)
PAPERS = {24: 5.1, 40: 2.4, 80: 1.75, 100: 1.6, 160: 1.4, 320: 1.25}
RECOMPUTED = 2.6


def compute(traces: Traces, known: Known) -> dict[str, Any]:
    trace = traces["synthetic"]
    found: dict[str, Any] = {}
    for rate in RATES:
        figures = report(run(PAPER_CLUSTER | {"hardware": {"nic": rate * GBPS}}, trace))
        found[str(rate)] = [figures["ttft_mean_s"], figures["moved_tokens"]]
    found["recomputed"] = report(run(PAPER_CLUSTER | {"policy": "local_cache"}, trace))["ttft_mean_s"]
    return found


def draw(data: dict[str, Any], path: Path) -> None:
    with figure(path, width=7) as (axes,):
        axes.plot(RATES, [data[str(rate)][0] for rate in RATES], "o-", color=COLOURS[0], label="ours", ms=4)
        axes.plot(list(PAPERS), list(PAPERS.values()), "x--", color=PAPER, label="the paper's", lw=0.8)
        axes.axhline(data["recomputed"], color=COLOURS[0], ls=":", label="ours, local caches only")
        axes.axhline(RECOMPUTED, color=PAPER, ls=":", label="the paper's, recomputed")
        logarithmic(axes, RATES)
        axes.set_xlabel("bandwidth of a node, each way (Gbps)")
        axes.set_ylabel("mean TTFT (s)")
        from_zero(axes)
        axes.legend(frameon=False, fontsize=8)


def text(data: dict[str, Any]) -> str:
    rows = [(rate, *data[str(rate)], PAPERS.get(rate, "")) for rate in RATES]
    return (
        f"Local caches only, nothing fetched: {data['recomputed']:.2f} s (the paper's recomputation: ~{RECOMPUTED} s). "
        "Fetches share the NICs with the KV that goes from prefill to decode, each NIC with its own queue. "
        "The knee lies between 40 and 60 Gbps, the paper's between 40 and 100. Below it Algorithm 1 loses to local "
        "caches: its ratio makes instances without the prefix wait for a transfer, whatever it takes, so that requests "
        "queue where the prefix is.\n\n" + markdown(("Gbps", "ours (s)", "tokens fetched", "paper (s)"), rows)
    )


FIGURE = Figure("13", "Mean TTFT by bandwidth, synthetic", ("synthetic",), compute, draw, text)
