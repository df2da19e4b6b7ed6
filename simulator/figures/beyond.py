"""Beyond Algorithm 1: what each departure from it brings on the same nodes, near saturation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.figures.figure import PAPER_CLUSTER, Figure, Known, Traces, markdown
from simulator.plots import bars, figure
from simulator.report import report
from simulator.runs import run

SPEED = {"conversation": 1.75, "synthetic": 2.0, "toolagent": 1.5}
"""Arrivals, as multiples of the trace's own. Caches begin cold: the synthetic trace then asks for more than eight
prefill nodes can do for its first minutes, and for some 80 % of it later."""

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": PAPER_CLUSTER,
    "priced": {"policy": "global_cache", "decode_cache": False},
    "+ decode caches": {"policy": "global_cache"},
    "+ short first": {"policy": "global_cache", "overtake": 4.0},
}
KEEP = ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "goodput", "moved_tokens", "hit_by_token", "prefill_mean_s")


def compute(traces: Traces, known: Known) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, trace in traces.items():
        hurried = [request._replace(arrival=request.arrival / SPEED[name]) for request in trace]
        runs = {variant: report(run(settings, hurried)) for variant, settings in VARIANTS.items()}
        found[name] = {
            variant: {key: figures[key] for key in KEEP} | {"effective": figures["effective"]["100"]}
            for variant, figures in runs.items()
        }
    return found


def draw(data: dict[str, Any], path: Path) -> None:
    with figure(path, columns=2, width=6) as (first, second):
        for axes, key, label in (
            (first, "ttft_mean_s", "mean TTFT (s)"),
            (second, "ttft_p90_s", "TTFT, 90th percentile (s)"),
        ):
            bars(axes, list(VARIANTS), {name: [found[v][key] for v in VARIANTS] for name, found in data.items()})
            axes.set_ylabel(label)
            axes.set_xlabel("scheduling, each with those before it")


def text(data: dict[str, Any]) -> str:
    rows = []
    for name, found in data.items():
        base = found["paper"]
        for variant, figures in found.items():
            mean, p90, p99 = (figures[key] for key in ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s"))
            less = mean / base["ttft_mean_s"] - 1
            rows.append(
                (name, variant, mean, f"{less:+.0%}", p90, p99, f"{figures['effective']:.1%}", figures["goodput"],
                 f"{figures['moved_tokens'] / 1e6:.1f} M", figures["hit_by_token"])
            )  # fmt: skip
    head = (
        "trace",
        "variant",
        "mean TTFT (s)",
        "",
        "p90 (s)",
        "p99 (s)",
        "effective, 100 ms",
        "goodput (1/s)",
        "moved",
        "hit",
    )
    speeds = ", ".join(f"{name} {SPEED[name]:g} times" for name in data)
    said = (
        f"Eight prefill and eight decode nodes; arrivals hurried: {speeds}. Caches begin cold. *priced*: policy "
        "`global_cache`: both branches of Algorithm 1 priced for each instance, fetches overlapped with queueing, "
        "prefixes that are being computed waited for, equals told apart by work. *+ decode caches*: decode nodes keep "
        "what landed, are sources, and are not sent what they have. *+ short first*: a prompt may be overtaken by "
        "those that come up to four times its own compute after it, until it has waited for 30 s: the conductor moves "
        "deadlines, which prefill orders its queue by (setting `queue_overtake`)."
    )
    live = (
        "Overtaking was tried on live meshes too (4P4D of the simulated engine near saturation, objective 20 s, once "
        "each; `python -m benchmarks order`, docs/decisions.md): mean TTFT 9.5 to 6.1 s on synthetic and 8.5 to 5.6 s "
        "on conversation, the simulator of the same files 12.3 to 7.0 and 7.9 to 5.2. The slowest of the longest tenth "
        "came at 20.8 and 24.0 s instead of 15.1 and 17.3, after the objective that they were let in for, and goodput "
        "did not rise. So it is off."
    )
    return f"{said}\n\n{live}\n\n{markdown(head, rows)}"


FIGURE = Figure("beyond", "Beyond Algorithm 1", (), compute, draw, text)
