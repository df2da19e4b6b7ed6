"""Plots: axes with units, a legend, the paper's points where there are any. Needs matplotlib (extra ``plots``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simulator.request import Request
    from simulator.sizing import Tried

OURS, PAPER, GREY = "#1f6fb4", "#d9531e", "#666666"
COLOURS = (OURS, "#2a9d5c", "#8a5fbf", "#c28a00", "#4c4c4c", "#c2477f", "#13a3a3")


@contextmanager
def figure(path: Path, columns: int = 1, width: float = 6.0, height: float = 4.0) -> Iterator[Sequence[Axes]]:
    """One row of axes, saved to ``path`` (its suffix says how) when the block ends. Raises ImportError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=(width * columns, height), squeeze=False, layout="constrained")
    for one in axes[0]:
        one.grid(alpha=0.25)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    yield list(axes[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)


def logarithmic(axes: Axes, ticks: Sequence[float]) -> None:
    """The x axis, with plain numbers at these places only."""
    from matplotlib.ticker import NullFormatter

    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())


def from_zero(axes: Axes) -> None:
    """The y axis, with room above what was drawn."""
    axes.set_ylim(0, 1.06 * axes.get_ylim()[1])


def bars(axes: Axes, names: Sequence[str], series: Mapping[str, Sequence[float]], text: str = "{:.2f}") -> None:
    """Groups of bars, one for each series, with their values on top. "paper" has its own colour."""
    width = 0.8 / len(series)
    for at, (label, values) in enumerate(series.items()):
        where = np.arange(len(names)) + width * (at - (len(series) - 1) / 2)
        colour = PAPER if label == "paper" else COLOURS[at % len(COLOURS)]
        drawn = axes.bar(where, values, width * 0.92, label=label, color=colour)
        axes.bar_label(drawn, [text.format(value) for value in values], fontsize=7, padding=1)
    axes.set_xticks(np.arange(len(names)), names)
    axes.legend(frameon=False, fontsize=8)


def shares(axes: Axes, label: str, values: Sequence[float], of: int, **style: Any) -> None:
    """Share of ``of`` requests whose value is at most x."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    axes.step(ordered, np.arange(1, len(ordered) + 1) / max(1, of), where="post", label=label, **style)


def distributions(runs: Mapping[str, Sequence[Request]], path: Path) -> None:
    """TTFT and TBT of several runs, as cumulative shares of all their requests. Raises ImportError."""
    with figure(path, columns=2) as (first, second):
        for at, (label, requests) in enumerate(runs.items()):
            done = [one for one in requests if one.ended == "done"]
            colour = COLOURS[at % len(COLOURS)]
            shares(first, label, [one.ttft for one in done], len(requests), color=colour)
            shares(second, label, [1000 * one.tbt for one in done], len(requests), color=colour)
        first.set_xlabel("TTFT (s)")
        second.set_xlabel("TBT: mean of the longest 10 % of a request's intervals (ms)")
        for axes in (first, second):
            axes.set_xscale("symlog", linthresh=0.1 if axes is first else 10)
            axes.set_ylim(0, 1.02)
            axes.set_ylabel("share of all requests")
            axes.legend(frameon=False, fontsize=8)


def ratios(curve: Sequence[Tried], share: float, path: Path) -> None:
    """Shares by the ratio of prefill to decode nodes. Raises ImportError."""
    with figure(path, width=7) as (axes,):
        names = [f"{one.prefill}P{one.decode}D" for one in curve]
        series = (("TTFT met", "ttft_share"), ("TBT met", "tbt_share"), ("both", "effective"))
        for at, (label, key) in enumerate(series):
            values = [100 * getattr(one, key) for one in curve]
            axes.plot(range(len(curve)), values, "o-", color=COLOURS[at], label=label, ms=4)
        axes.set_xticks(range(len(curve)), names)  # given as values, "4P2D" would be tried as a date, with warnings
        axes.axhline(100 * share, color=PAPER, ls=":", label="asked for")
        axes.set_xlabel("prefill and decode nodes")
        axes.set_ylabel("requests (%)")
        axes.set_ylim(0, 103)
        axes.legend(frameon=False, fontsize=8)
