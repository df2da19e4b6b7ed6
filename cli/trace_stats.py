"""``mooncake trace-stats``: what a trace says before anything is simulated."""

from __future__ import annotations

import click

from cli.console import out, print_json, table
from cli.trace_options import numbers, whole_trace
from shared.workload.trace import BLOCK


@click.command("trace-stats", short_help="Show a trace's lengths, and what caches would find.")
@click.option(
    "--trace", "path", type=click.Path(exists=True, dir_okay=False), required=True, help="JSONL, as published."
)
@click.option(
    "--capacity", default="1000,10000,inf", show_default=True, help=f"Of one LRU cache, in blocks of {BLOCK} tokens."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def trace_stats_command(path: str, capacity: str, as_json: bool) -> None:
    """Lengths of a trace, and the share of its input tokens that one LRU cache of each size would find.

    Only the order of requests counts; a partial last block counts by its tokens.
    """
    from simulator.trace_stats import trace_stats

    sizes = numbers(capacity, "--capacity")
    stats = trace_stats(whole_trace(path), sizes)
    lru = {part.strip(): stats.lru[size] for part, size in zip(capacity.split(","), sizes, strict=True)}
    document = {
        "requests": stats.requests,
        "input_mean": stats.input_mean,
        "output_mean": stats.output_mean,
        "input_max": stats.input_max,
        "seconds": stats.seconds,
        "rate": stats.rate,
        "unique_blocks": stats.unique_blocks,
        "lru": lru,
    }
    if as_json:
        print_json(document)
        return
    lines = table(("",), ("value",))
    for name in ("requests", "input_mean", "output_mean", "input_max", "seconds", "rate", "unique_blocks"):
        lines.add_row(name.replace("_", " "), f"{document[name]:,.6g}")
    out.print(lines)
    hits = table((), ("blocks", "tokens", "hit by token"), title="one LRU cache")
    for size, hit in stats.lru.items():
        hits.add_row(f"{size:,.0f}", f"{size * BLOCK:,.0f}", f"{hit:.4f}")
    out.print(hits)
