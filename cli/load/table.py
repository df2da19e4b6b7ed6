"""The figures of a load as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape

from cli.console import table

POINTS = ("mean", "p50", "p90", "p99")
TIMES = {
    "ttft": "time to first token",
    "tbt": "TBT (worst tenth of gaps)",
    "mean_gap": "mean gap",
    "request": "request",
}


def load_table(figures: dict[str, Any]) -> RenderableType:
    times = table(("seconds",), POINTS)
    for name, shown in TIMES.items():
        times.add_row(shown, *(number(figures[f"{name}_{point}_s"]) for point in POINTS))
    counts = table(("", ""))
    for what, value in _rows(figures):
        counts.add_row(what, escape(value))  # an error's text is a server's
    return Group("", times, "", counts)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    f = figures
    within = f"within {f['slo_ttft_s']:g} s and {f['slo_tbt_s']:g} s"
    rows = [
        ("requests", f"{f['requests']} in {f['arrivals_s']:.1f} s ({number(f['offered_rps'])}/s)"),
        ("answered", f"{f['completed']} after {f['seconds']:.1f} s"),
        ("refused (429)", f"{f['rejected']}{_refusal(f)}"),
        ("errors", _errors(f)),
        ("effective", f"{percent(f['effective'])} of all, {percent(f['effective_of_accepted'])} of answered, {within}"),
        ("effective by TBT", ", ".join(f"{ms} {percent(share)}" for ms, share in f["effective_by_tbt"].items())),
        ("goodput", f"{number(f['goodput_rps'])} requests/s, {number(f['completion_tokens_per_s'])} tokens/s answered"),
        ("cache hits", f"{percent(f['hit_by_token'])} by token; an endless cache {percent(f['hit_possible'])}"),
        ("generator late", f"p50 {number(f['late_p50_s'])} s, p99 {number(f['late_p99_s'])} s"),
    ]
    if f["retries"]:
        rows.insert(3, ("retries accepted", f"{percent(f['retry_acceptance'])} of {f['retries']}"))
    return rows


def _refusal(figures: dict[str, Any]) -> str:
    p99 = figures["refusal_p99_s"]
    return "" if p99 is None else f" (p99 after {number(p99)} s)"


def _errors(figures: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in figures["errors_by_kind"].items())
    return f"{figures['errors']}" + (f": {kinds}" if kinds else "")
