"""Plots of a load: times to first token and between tokens, what happened when, and what lengths cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cli.load.outcome import End, Outcome
from cli.plots import figure
from cli.plots import require as check_plots
from shared.workload.measures import quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cli.load.report import Objective

__all__ = ["check_plots", "plot_load"]

COLOURS = {End.OK: "tab:blue", End.REJECTED: "tab:orange", End.ERROR: "tab:red", End.UNFINISHED: "tab:gray"}
NAMES = {End.OK: "answered", End.REJECTED: "refused", End.ERROR: "errors", End.UNFINISHED: "unfinished"}
WINDOWS = 40


def plot_load(path: str, outcomes: Sequence[Outcome], objective: Objective) -> None:
    """Writes four panels to ``path``."""
    answered = [outcome for outcome in outcomes if outcome.end is End.OK and outcome.ttft is not None]
    with figure(path, 2, 2) as axes:
        ttfts = [outcome.ttft for outcome in answered if outcome.ttft is not None]
        _distribution(axes[0][0], ttfts, objective.ttft, "time to first token (s)")
        tbts = [outcome.tbt for outcome in answered if outcome.tbt is not None]
        _distribution(axes[0][1], tbts, objective.tbt, "TBT: mean of the worst tenth of gaps (s)")
        _over_time(axes[1][0], outcomes)
        _by_length(axes[1][1], answered)


def _distribution(axes: Axes, values: Sequence[float], objective: float, what: str) -> None:
    """Share of answers within so many seconds; the objective as a line, where it is anywhere near."""
    ordered = sorted(values)
    axes.set(xlabel=what, ylabel="share of answers", ylim=(0, 1.02))
    if not ordered:
        return
    axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], drawstyle="steps-post")
    if ordered[0] > 0 and ordered[-1] > 20 * ordered[0]:
        axes.set_xscale("log")
    for share in (0.5, 0.9, 0.99):
        at = quantile(ordered, share)
        axes.plot([at], [share], "o", color="black", markersize=4)
        place: dict[str, Any] = (
            {"xytext": (-6, 4), "ha": "right"} if share > 0.5 else {"xytext": (6, -11), "ha": "left"}
        )
        text = f"p{100 * share:.0f} {at:.3g} s"
        axes.annotate(text, (at, share), textcoords="offset points", fontsize=8, **place)
    if objective < 5 * ordered[-1]:
        axes.axvline(objective, color="tab:red", linestyle="--", label=f"objective {objective:g} s")
        axes.legend(loc="lower right")


def _over_time(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """Arrivals per second, by what became of them."""
    axes.set(xlabel="arrival (s after the beginning)", ylabel="arrivals per second")
    last = max((outcome.due for outcome in outcomes), default=0.0)
    if last <= 0:
        return
    width = last / WINDOWS
    kinds = [kind for kind in NAMES if any(outcome.end is kind for outcome in outcomes)]
    below = [0.0] * WINDOWS
    for kind in kinds:
        rates = [0.0] * WINDOWS
        for outcome in outcomes:
            if outcome.end is kind:
                rates[min(WINDOWS - 1, int(outcome.due / width))] += 1 / width
        middles = [(i + 0.5) * width for i in range(WINDOWS)]
        axes.bar(middles, rates, width, bottom=below, color=COLOURS[kind], label=NAMES[kind])
        below = [low + rate for low, rate in zip(below, rates, strict=True)]
    axes.legend(loc="upper right")


def _by_length(axes: Axes, answered: Sequence[Outcome]) -> None:
    """Time to first token by what had to be computed, coloured by what was cached."""
    axes.set(xlabel="tokens of the prompt", ylabel="time to first token (s)")
    if not answered:
        return
    lengths: list[Any] = [outcome.prompt_tokens or outcome.input_tokens for outcome in answered]
    shares = [(outcome.cached_tokens or 0) / (outcome.prompt_tokens or 1) for outcome in answered]
    dots = axes.scatter(lengths, [outcome.ttft or 0.0 for outcome in answered], c=shares, s=10, vmin=0, vmax=1)
    axes.set(ylim=(0, None), xlim=(0, None))
    assert axes.figure is not None
    axes.figure.colorbar(dots, ax=axes, label="share of the prompt cached")
