"""``mooncake simulate``: a trace through a cluster that nobody has bought yet."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cli.console import err, out, print_json, table
from cli.trace_options import plain, plottable, replayed, settings_file
from shared.workload.trace import TraceRequest

SHOWN = (
    "ttft_mean_s", "ttft_p90_s", "tbt_mean_s", "tbt_p90_s", "hit_by_token", "prefill_mean_s", "moved_tokens", "goodput",
    "rejected",
)  # fmt: skip


@click.command(short_help="Replay a trace through a cluster in virtual time.")
@click.option(
    "--trace", "path", type=click.Path(exists=True, dir_okay=False), required=True, help="JSONL, as published."
)
@click.option("--prefill", type=click.IntRange(1), default=8, show_default=True, help="Prefill nodes.")
@click.option("--decode", type=click.IntRange(1), default=8, show_default=True, help="Decode nodes.")
@click.option("--policy", default="global_cache", show_default=True, help="How requests are placed.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of all that is random.")
@click.option("--speed", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True, help="Of arrivals.")
@click.option("--requests", "count", type=click.IntRange(1), help="The first so many of the trace.")
@click.option("--ticks", is_flag=True, help="Arrivals as noted; else those at one instant are spread until the next.")
@click.option("--ttft-slo", type=click.FloatRange(0, min_open=True), help="Seconds; what is expected later is refused.")
@click.option("--tbt-slo", type=click.FloatRange(0, min_open=True), help="Seconds; the same for decoding.")
@click.option("--coupled", is_flag=True, help="Prefill + decode nodes that each do both, as the paper's baseline.")
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False), help="YAML or JSON: any setting of the cluster."
)
@click.option(
    "--set", "single", multiple=True, metavar="KEY=VALUE", help="One setting, as threshold=2, hardware.nic=1e10."
)
@click.option("--sweep", multiple=True, metavar="KEY=A,B,C", help="Each value in turn; several make a grid.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Distributions of TTFT and TBT, as PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; a list with --sweep.")
def simulate(
    path: str, prefill: int, decode: int, policy: str, seed: int, speed: float, count: int | None, ticks: bool,
    ttft_slo: float | None, tbt_slo: float | None, coupled: bool, config: str | None, single: Sequence[str],
    sweep: Sequence[str], plot: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay a trace through a cluster in virtual time, with the conductor's own scheduler.

    The default hardware is the paper's: nodes of eight A800 with LLaMA3-70B.
    """
    plottable(plot)
    base = settings_file(config)
    given: dict[str, Any] = (
        {"nodes": prefill + decode} if coupled else {"prefill": prefill, "decode": decode, "policy": policy}
    )
    given |= {"ttft_slo": ttft_slo, "tbt_slo": tbt_slo} if not coupled else {}
    base = base | {name: value for name, value in given.items() if value is not None} | {"seed": seed}
    for pair in single:
        put(base, *split(pair, "--set"))
    rows = list(variants(base, sweep))
    for _, settings in rows:
        checked(settings, coupled)
    trace = replayed(path, seed, speed, count, ticks)
    results = [(label, one_run(settings, coupled, trace, label)) for label, settings in rows]
    if plot:
        from simulator.plots import distributions

        distributions({label or policy: requests for label, (_, requests) in results}, Path(plot))
    if as_json:
        documents = [{"settings": label, **figures} if sweep else figures for label, (figures, _) in results]
        print_json(documents if sweep else documents[0])
        return
    show([(label or ("coupled" if coupled else policy), figures) for label, (figures, _) in results])


def split(pair: str, option: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not equals or not name or not value:
        raise click.BadParameter(f"{option} {pair!r} is not KEY=VALUE")
    return name, value


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """``hardware.nic`` goes into the mapping ``hardware``."""
    *path, last = name.split(".")
    for part in path:
        settings = settings.setdefault(part, {})
        if not isinstance(settings, dict):
            raise click.BadParameter(f"{name}: {part} is {settings!r}, which has no settings")
    settings[last] = plain(value, name) if isinstance(value, str) else value


def variants(base: dict[str, Any], sweep: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, settings) for every combination of the swept values."""
    axes = [[(name, value) for value in values.split(",")] for name, values in (split(one, "--sweep") for one in sweep)]
    for chosen in itertools.product(*axes):
        settings = copy.deepcopy(base)
        for name, value in chosen:
            put(settings, name, value)
        yield " ".join(f"{name}={value}" for name, value in chosen), settings


def checked(settings: dict[str, Any], coupled: bool) -> None:
    """Before anything is run, for hours perhaps. Raises ClickException."""
    from simulator.runs import read
    from simulator.settings import ClusterSettings, CoupledSettings

    try:
        read(settings, CoupledSettings) if coupled else read(settings, ClusterSettings)
    except ValueError as error:
        words = str(error).replace("Object contains unknown field", "there is no setting")
        raise click.ClickException(words) from None


def one_run(
    settings: dict[str, Any], coupled: bool, trace: list[TraceRequest], label: str
) -> tuple[dict[str, Any], Any]:
    from simulator.report import TTFT_SLO, report
    from simulator.runs import coupled_run, run

    with bar(label or "requests", len(trace)) as progress:
        task = progress.add_task(label or "requests", total=len(trace))

        def arrived(count: int) -> None:
            progress.update(task, completed=count)

        try:
            requests = (coupled_run if coupled else run)(settings, trace, arrived)
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    return report(requests, float(settings.get("ttft_slo") or TTFT_SLO)), requests


def bar(label: str, total: int) -> Progress:
    """On stderr, where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal)


def show(results: Sequence[tuple[str, dict[str, Any]]]) -> None:
    thresholds = list(results[0][1]["effective"])
    lines = table(("",), (*SHOWN, *(f"effective {ms} ms" for ms in thresholds)))
    for label, figures in results:
        shares = (f"{figures['effective'][ms]:.1%}" for ms in thresholds)
        lines.add_row(label, *(f"{figures[name]:,.4g}" for name in SHOWN), *shares)
    out.print(lines)
