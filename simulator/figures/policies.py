"""Fig. 5: mean TTFT by scheduling policy, on conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.figures.figure import PAPER_CLUSTER, Figure, Known, Traces, markdown
from simulator.plots import bars, figure
from simulator.report import report
from simulator.runs import run

POLICIES: dict[str, dict[str, Any]] = {
    "random": {"policy": "random", "fetches": False},
    "load balancing": {"policy": "least_loaded", "fetches": False},
    "local cache": {"policy": "local_cache"},
    "global cache": {},
}
PAPERS = {"random": 19.65, "load balancing": 5.27, "local cache": 3.58, "global cache": 3.07}


def compute(traces: Traces, known: Known) -> dict[str, Any]:
    trace = traces["conversation"]
    runs = {name: report(run(PAPER_CLUSTER | chosen, trace)) for name, chosen in POLICIES.items()}
    keep = ("ttft_mean_s", "ttft_p90_s", "hit_by_token", "prefill_mean_s")
    return {name: {key: figures[key] for key in keep} for name, figures in runs.items()}


def draw(data: dict[str, Any], path: Path) -> None:
    with figure(path, width=7) as (axes,):
        ours = [data[name]["ttft_mean_s"] for name in POLICIES]
        bars(axes, list(POLICIES), {"ours": ours, "paper": list(PAPERS.values())})
        axes.set_ylabel("mean TTFT (s)")
        axes.set_xlabel("policy")


def text(data: dict[str, Any]) -> str:
    best, theirs = data["global cache"]["ttft_mean_s"], PAPERS["global cache"]
    rows = [
        (name, data[name]["ttft_mean_s"], data[name]["ttft_mean_s"] / best, PAPERS[name], PAPERS[name] / theirs,
         data[name]["hit_by_token"])
        for name in POLICIES
    ]  # fmt: skip
    return (
        "Eight prefill and eight decode nodes. The order is the paper's. Ours are earlier in absolute terms: "
        "the trace is spread within its three-second ticks, its first half hour asks for less than all of it, and only "
        "queues, fetches and the model's time count here. What the paper measured has more queueing in it.\n\n"
        + markdown(("policy", "ours (s)", "× global", "paper (s)", "× global", "our hit rate"), rows)
    )


FIGURE = Figure("5", "Mean TTFT by policy, conversation", ("conversation",), compute, draw, text)
