"""Fig. 14: where the time of one request goes, with and without a cached prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simulator.figures.figure import Figure, Known, Traces, markdown
from simulator.plots import COLOURS, PAPER, figure, from_zero
from simulator.settings import Hardware

LENGTHS = (8, 16, 32, 64, 128)
PREFIX = 0.95
HOST_TO_DEVICE = 128e9 * 0.7
"""Bytes per second from a node's DRAM to its GPUs: the paper's load of 95 % of 128k takes ~0.45 s."""

OUTPUT = 128
PAPERS = (1.0, 2.0, 4.5, 10.6, 27.6)
DECODE = {8: 3.4, 128: 3.95}


def compute(traces: Traces, known: Known) -> dict[str, Any]:
    node = Hardware()
    found: dict[str, Any] = {}
    for thousands in LENGTHS:
        tokens = thousands * 1024
        cached = int(PREFIX * tokens)
        size = cached * node.bytes_per_token
        found[str(thousands)] = {
            "prefill": node.prefill.seconds(tokens, 0),
            "prefill_cached": node.prefill.seconds(tokens, cached),
            "transfer": size / node.nic,
            "load": size / HOST_TO_DEVICE,
            "decode": sum(node.decode.seconds(1, tokens + step) for step in range(OUTPUT)),
        }
    return found


def draw(data: dict[str, Any], path: Path) -> None:
    with figure(path, columns=2, width=6) as (first, second):
        where = range(len(LENGTHS))
        whole = [data[str(n)]["prefill"] for n in LENGTHS]
        first.bar([x - 0.2 for x in where], whole, 0.38, color=COLOURS[0], label="no prefix: prefill")
        bottom = [0.0] * len(LENGTHS)
        for at, part in enumerate(("prefill_cached", "transfer", "load")):
            values = [data[str(n)][part] for n in LENGTHS]
            label = f"95 % cached: {part.replace('_cached', '')}"
            first.bar([x + 0.2 for x in where], values, 0.38, bottom=bottom, color=COLOURS[at + 1], label=label)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
        first.plot([x - 0.2 for x in where], PAPERS, "x", color=PAPER, label="paper")
        first.set_ylabel("time (s)")
        second.plot(LENGTHS, [data[str(n)]["decode"] for n in LENGTHS], "o-", color=COLOURS[0], label="ours")
        second.plot(list(DECODE), list(DECODE.values()), "x", color=PAPER, label="paper")
        second.set_ylabel(f"{OUTPUT} decode steps (s)")
        from_zero(second)
        first.set_xticks(list(where), [f"{n}k" for n in LENGTHS])
        for axes in (first, second):
            axes.set_xlabel("prompt (tokens)" if axes is first else "prompt (thousand tokens)")
            axes.legend(frameon=False, fontsize=8)


def text(data: dict[str, Any]) -> str:
    rows = [
        (f"{n}k", found["prefill"], theirs, found["prefill_cached"], found["transfer"], found["load"], found["decode"])
        for (n, found), theirs in zip(data.items(), PAPERS, strict=True)
    ]
    last = data["128"]
    saved = 1 - (last["prefill_cached"] + last["transfer"] + last["load"]) / last["prefill"]
    less = 1 - last["prefill_cached"] / last["prefill"]
    return (
        "These are the models that every other figure rests on, fitted to this one of the paper: agreement shows the "
        f"fit, nothing more. At 128k, 95 % cached, prefill takes {less:.0%} less (the paper: 92 %), and with transfer "
        f"and load one after the other {saved:.0%} less in all (86 %).\n\n"
        + markdown(("prompt", "prefill (s)", "paper (s)", "95 %: prefill", "transfer", "load", "128 steps"), rows)
    )


FIGURE = Figure("14", "Where one request's time goes", (), compute, draw, text)
