"""``mooncake trace``: where the time of one request went, as a waterfall, from the mesh's own memory of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import click
import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.api import DEFAULT_URL, Api, ApiError, hinted
from cli.clocks import adjusted
from cli.console import out, print_json
from shared.span_record import SpanRecord, Traced

BAR = 40
"""Characters that the whole request takes."""

COLOURS = ("cyan", "green", "magenta", "yellow", "blue")
HIDDEN = ("http.", "url.", "gen_ai.", "mooncake.request", "error.type")
"""Attributes that are the same on every request, or stand elsewhere in the picture."""


def in_order(spans: list[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    """(depth, span), parents before their children, those by their start. A parent that is not here counts as none."""
    known = {span.span for span in spans}
    below: dict[str, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        below.setdefault(span.parent if span.parent in known else "", []).append(span)
    stack = [(0, span) for span in reversed(below.get("", []))]
    while stack:
        depth, span = stack.pop()
        yield depth, span
        stack += [(depth + 1, child) for child in reversed(below.pop(span.span, []))]


def bar(span: SpanRecord, start: int, end: int, colour: str) -> Text:
    """Its part of the time from ``start`` to ``end``, at least one mark wide."""
    scale = BAR / max(end - start, 1)
    first = min(int((span.start - start) * scale), BAR - 1)
    width = max(1, min(round((span.end - span.start) * scale), BAR - first))
    style = "red" if span.status == "error" else colour
    return Text(" " * first) + Text("█" * width, style=style) + Text(" " * (BAR - first - width))


def details(span: SpanRecord) -> str:
    shown = {name.removeprefix("mooncake."): value for name, value in span.attributes.items() if shows(name)}
    words = [f"{name}={short(value)}" for name, value in shown.items()]
    if span.status == "error":
        words.insert(0, span.reason or "error")
    if span.links:
        words.append(f"shared with {len(span.links)}")
    return " ".join(words)


def shows(name: str) -> bool:
    return not name.startswith(HIDDEN)


def short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else text[:21] + "..."


def waterfall(traced: Traced) -> RenderableType:
    if not traced.spans:
        return Text("no spans")
    spans, shifts = adjusted([span for _, span in in_order(traced.spans)])
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    services = {span.service: COLOURS[i % len(COLOURS)] for i, span in enumerate(first_of_each(spans))}
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("span", "service"):
        table.add_column(name, no_wrap=True)
    for name in ("at ms", "took ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for depth, span in in_order(spans):
        colour = services[span.service]
        at, took = (span.start - start) / 1e6, (span.end - span.start) / 1e6
        table.add_row(
            Text("  " * depth + span.name),
            Text(span.service.removeprefix("mooncake-"), style=colour),
            f"{at:.1f}",
            f"{took:.1f}",
            bar(span, start, end, colour),
            Text(details(span), style="dim"),
        )
    moved = [Text(f"clock of {clock} adjusted by {by / 1e6:+.1f} ms", "yellow") for clock, by in shifts.items()]
    lost = [Text(f"no answer from {address}: {why}", style="yellow") for address, why in traced.missing.items()]
    return Group(Text(f"request {traced.request}   trace {traced.trace}", style="bold"), table, *moved, *lost)


def first_of_each(spans: list[SpanRecord]) -> list[SpanRecord]:
    return list({span.service: span for span in reversed(spans)}.values())


@click.command(short_help="Show where the time of one request went.")
@click.argument("request_id")
@click.option("--url", default=DEFAULT_URL, envvar="MOONCAKE_URL", show_default=True, help="The conductor.")
@click.option("--api-key", default="", envvar="MOONCAKE_API_KEY", help="Key, where the conductor asks for one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: all spans.")
def trace(request_id: str, url: str, api_key: str, as_json: bool) -> None:
    """Show where the time of request REQUEST_ID went: the id of its answer, or its x-request-id. The mesh remembers the
    last requests by itself (trace_requests), and needs no tracing backend for it."""
    try:
        answer: Any = Api(url, api_key, timeout=10).get(f"/trace/{quote(request_id, safe='')}")
    except ApiError as error:
        raise click.ClickException(hinted(error)) from None
    if as_json:
        print_json(answer)
    else:
        out.print(waterfall(msgspec.convert(answer, Traced)))
