"""``mooncake plan``: the smallest cluster that meets objectives on a trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.console import err, out, print_json, table
from cli.trace_options import plottable, replayed, settings_file

if TYPE_CHECKING:
    from simulator.sizing import Objective, Tried

LARGEST = 512


def objective(text: str, share: float) -> Objective:
    """``"ttft=30,tbt=0.1"``, in seconds. Raises BadParameter for another name, or what is no positive number."""
    from simulator.sizing import Objective

    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            raise click.BadParameter(f"--slo {part!r}: {value!r} is no number of seconds") from None
        if name.strip() not in ("ttft", "tbt"):
            raise click.BadParameter(f"--slo {part!r}: there are ttft and tbt")
        if not values[name.strip()] > 0:
            raise click.BadParameter(f"--slo {part!r} is not positive")
    return Objective(**values, share=share)


@click.command("plan", short_help="Find the smallest cluster for a trace.")
@click.option(
    "--trace", "path", type=click.Path(exists=True, dir_okay=False), required=True, help="JSONL, as published."
)
@click.option(
    "--slo", default="ttft=30,tbt=0.2", show_default=True, help="Seconds to the first token, and between tokens."
)
@click.option(
    "--share", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="Within both."
)
@click.option("--speed", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Of arrivals.")
@click.option("--requests", "count", type=click.IntRange(1), help="The first so many of the trace.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is random.")
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False), help="YAML or JSON: any setting of the cluster."
)
@click.option("--plot", type=click.Path(dir_okay=False), help="The curve, as PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def plan(
    path: str, slo: str, share: float, speed: float, count: int | None, seed: int, config: str | None, plot: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Find the least prefill and decode nodes that keep a share of a trace's requests within their objectives.

    The curve shows other ratios of as many nodes. A cold cluster is simulated: caches fill while the trace runs.
    """
    from simulator.runs import read
    from simulator.settings import ClusterSettings
    from simulator.sizing import Sizing

    goal = objective(slo, share)
    plottable(plot)
    given = settings_file(config)
    try:
        settings = read(given | {"seed": seed}, ClusterSettings)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    sizing = Sizing(replayed(path, seed, speed, count), goal, settings, LARGEST, said)
    found = sizing.smallest()
    if found is None:
        raise click.ClickException(f"{LARGEST} nodes of each role do not meet {slo} for {share:.0%} of the requests")
    curve = sizing.curve(found.prefill // settings.group + found.decode, found.prefill // settings.group)
    if plot:
        from simulator.plots import ratios

        ratios(curve, share, Path(plot))
    if as_json:
        print_json({"nodes": found.prefill + found.decode, **asdict(found), "curve": [asdict(one) for one in curve]})
        return
    out.print(f"{found.prefill} prefill and {found.decode} decode nodes: {found.effective:.1%} within {slo}")
    lines = table(("nodes",), ("TTFT met", "TBT met", "effective"))
    for one in curve:
        shares = (f"{value:.1%}" for value in (one.ttft_share, one.tbt_share, one.effective))
        lines.add_row(f"{one.prefill}P{one.decode}D", *shares)
    out.print(lines)


def said(run: Tried) -> None:
    """What was tried, on stderr where that is a terminal: a search takes a while."""
    if err.is_terminal:
        err.print(f"{run.prefill}P{run.decode}D: {run.effective:.1%}")
