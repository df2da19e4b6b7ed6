"""More than the nodes can do: which prompts are let in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulator.figures.figure import PAPER_CLUSTER, Figure, Known, Traces, markdown
from simulator.plots import bars, figure
from simulator.report import report
from simulator.request import Request
from simulator.runs import run

SPEED = {"conversation": 2.5, "synthetic": 2.5, "toolagent": 2.5}
"""Arrivals, as multiples of the trace's own."""

OBJECTIVE = 30.0
THRIFT = 10.0

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {**PAPER_CLUSTER, "ttft_slo": OBJECTIVE},
    "+ thrift": {**PAPER_CLUSTER, "ttft_slo": OBJECTIVE, "thrift": THRIFT},
    "all": {"policy": "global_cache", "overtake": 4.0, "ttft_slo": OBJECTIVE, "thrift": THRIFT},
}
KEEP = ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "goodput", "rejected", "requests", "moved_tokens")


def compute(traces: Traces, known: Known) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, trace in traces.items():
        hurried = [request._replace(arrival=request.arrival / SPEED[name]) for request in trace]
        found[name] = {variant: kept(run(settings, hurried)) for variant, settings in VARIANTS.items()}
    return found


def kept(requests: Sequence[Request]) -> dict[str, Any]:
    figures = report(requests, OBJECTIVE)
    refused = [one.trace.input_tokens for one in requests if one.ended != "done"]
    return {key: figures[key] for key in KEEP} | {"refused_tokens": float(np.mean(refused)) if refused else 0.0}


def draw(data: dict[str, Any], path: Path) -> None:
    with figure(path, columns=2, width=6) as (first, second):
        for axes, key, label in (
            (first, "ttft_mean_s", "mean TTFT of those let in (s)"),
            (second, "goodput", "goodput (requests/s)"),
        ):
            bars(axes, list(VARIANTS), {name: [found[v][key] for v in VARIANTS] for name, found in data.items()})
            axes.set_ylabel(label)
            axes.set_xlabel("scheduling")
            axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # the legend beside no bar


def text(data: dict[str, Any]) -> str:
    rows = []
    for name, found in data.items():
        base = found["paper"]
        for variant, figures in found.items():
            mean, goodput = figures["ttft_mean_s"], figures["goodput"]
            rows.append(
                (name, variant, mean, f"{mean / base['ttft_mean_s'] - 1:+.0%}", figures["ttft_p90_s"],
                 figures["ttft_p99_s"], goodput, f"{goodput / base['goodput'] - 1:+.1%}",
                 f"{figures['rejected'] / figures['requests']:.1%}", f"{figures['refused_tokens']:,.0f}",
                 f"{figures['moved_tokens'] / 1e6:.1f} M")
            )  # fmt: skip
    head = ("trace", "variant", "mean TTFT (s)", "", "p90 (s)", "p99 (s)", "goodput (1/s)", "", "refused",
            "their input, mean", "moved")  # fmt: skip
    speeds = ", ".join(f"{name} {SPEED[name]:g} times" for name in data)
    said = (
        f"The same nodes with arrivals hurried further: {speeds}. Whoever is expected to be later than {OBJECTIVE:g} s "
        f"is refused, as Algorithm 1 does. *+ thrift*: a prompt is let in where it waits at most the slack that its "
        f"compute leaves of the objective, divided by 1 + {THRIFT:g} times its share of it: seconds of prefill are "
        "what is short, and one long prompt takes those of many short ones. An idle mesh still takes all that it can "
        "do in time. *all*: that, and everything above. Goodput counts requests, not tokens: whoever sells tokens "
        "leaves this off, as it is. Who is refused and how long they are is in the table."
    )
    live = (
        "Tried live at a lower load, near saturation (`python -m benchmarks order`, docs/decisions.md), thrift cut the "
        "mean TTFT from 9.5 to 3.3 s on synthetic and from 8.5 to 3.6 s on conversation, but only 89.4 and 96.4 % "
        "of the requests were effective instead of 94.5 and 100 %: long prompts that would have been in time were "
        "refused. So it is off."
    )
    return f"{said}\n\n{live}\n\n{markdown(head, rows)}"


FIGURE = Figure("overload", "Beyond Algorithm 1: overload", (), compute, draw, text)
