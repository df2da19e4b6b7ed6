"""``mooncake status``: the mesh as a live table, from the conductor's ``GET /cluster``."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.api import DEFAULT_URL, Api, ApiError
from cli.console import out, print_json

GOOD = {"ready", "ok", "live", "alive", "healthy"}
WIDE = 160
"""Columns where there is no terminal to ask."""

BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in BINARY:
        if abs(count) < 1024 or unit == BINARY[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def cell(value: Any) -> str:
    """One value of unknown shape in a few characters."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{key} {cell(amount)}" for key, amount in value.items() if amount) or "-"
    if isinstance(value, (list, tuple)):
        return ",".join(map(cell, value)) or "-"
    return str(value)


def name_of(record: dict[str, Any]) -> str:
    """``id``, or the id inside a ``ref``."""
    ref = record.get("ref")
    return str(record.get("id") or (ref.get("id") if isinstance(ref, dict) else ref) or "-")


def state_of(record: dict[str, Any]) -> Text:
    load = record.get("load") or {}
    state = str(record.get("state") or ("draining" if load.get("draining") else "-"))
    return Text(state, style="green" if state in GOOD else "dim" if state == "-" else "red")


def instances(records: Iterable[dict[str, Any]]) -> Table:
    """Fits 80 columns with the names that ``mooncake up`` gives."""
    table = Table("instance", "node", "state", title="Instances", title_justify="left", box=None)
    for column in ("queued", "running", "KV tokens", "free blocks"):
        table.add_column(column, justify="right")
    for record in sorted(records, key=lambda r: (str(r.get("role")), name_of(r))):
        load = record.get("load") or {}
        queued = cell(load.get("queued", 0)) + (f" ({tokens} tok)" if (tokens := load.get("queued_tokens")) else "")
        room = f"{load['room_blocks']}/{load.get('total_blocks', 0)}" if "room_blocks" in load else "-"
        counts = [queued, cell(load.get("running", 0)), cell(load.get("kv_tokens", 0)), room]
        table.add_row(name_of(record), cell(record.get("node")), state_of(record), *counts)
    return table


def agents(records: Iterable[dict[str, Any]]) -> Table:
    table = Table("agent", title="Store agents", title_justify="left", box=None)
    for column in ("blocks", "in use", "pool", "outgoing", "held"):
        table.add_column(column, justify="right")
    for record in sorted(records, key=name_of):
        used, slots = int(record.get("used") or 0), int(record.get("slots") or 0)
        size = int(record.get("slot_bytes") or 0)
        pool = bytes_text(slots * size) if slots else "-"
        backlog = bytes_text(int(record.get("backlog_bytes") or 0))
        share = f"{100 * used / max(slots, 1):.0f} %"
        table.add_row(name_of(record), f"{used}/{slots}", share, pool, backlog, cell(record.get("held")))
    return table


def ssd_tiers(records: Iterable[dict[str, Any]]) -> list[Table]:
    """One table, of the agents that have such a tier; none where nobody has."""
    table = Table("agent", "state", title="SSD tiers", title_justify="left", box=None)
    for column in ("blocks", "on disk", "hits", "written", "lost", "read/s", "write/s"):
        table.add_column(column, justify="right")
    for record in sorted((r for r in records if r.get("ssd")), key=name_of):
        ssd = record["ssd"]
        size = f"{bytes_text(ssd.get('bytes', 0))}/{bytes_text(ssd.get('capacity', 0))}"
        counts = [cell(ssd.get(name, 0)) for name in ("read", "written", "lost")]
        rates = [bytes_text(ssd[name]) if ssd.get(name) else "-" for name in ("read_rate", "write_rate")]
        state = Text(str(ssd.get("state")), style="green" if ssd.get("state") == "on" else "red")
        table.add_row(name_of(record), state, cell(ssd.get("blocks", 0)), size, *counts, *rates)
    return [table] if table.row_count else []


def nics(records: Iterable[dict[str, Any]]) -> list[Table]:
    """One table of RDMA devices; none where no agent uses any."""
    table = Table("agent", "NIC", "state", "address", title="RDMA devices", title_justify="left", box=None)
    for column in ("pairs", "queued", "read", "written", "broken"):
        table.add_column(column, justify="right")
    for record in sorted(records, key=name_of):
        for nic in record.get("nics") or []:
            state = Text(str(nic.get("state")), style="green" if nic.get("state") == "active" else "red")
            sizes = [bytes_text(nic.get(name, 0)) for name in ("queued", "read", "written")]
            counts = cell(nic.get("pairs", 0)), *sizes, cell(nic.get("broken", 0))
            table.add_row(name_of(record), cell(nic.get("name")), state, cell(nic.get("gid")), *counts)
    return [table] if table.row_count else []


def render(cluster: dict[str, Any], url: str) -> RenderableType:
    """Both tables, then whatever else the conductor tells of itself, one line a topic."""
    parts: list[RenderableType] = [Text(f"{url}  {time.strftime('%H:%M:%S')}", style="dim")]
    stores = cluster.get("agents") or []
    parts += [instances(cluster.get("instances") or []), agents(stores), *ssd_tiers(stores), *nics(stores)]
    for topic, value in cluster.items():
        if topic not in ("instances", "agents"):
            parts.append(Text.assemble((f"{topic}: ", "bold"), cell(value)))
    return Group(*parts)


@click.command()
@click.option("--url", default=DEFAULT_URL, envvar="MOONCAKE_URL", show_default=True, help="The conductor.")
@click.option("--api-key", default="", envvar="MOONCAKE_API_KEY", help="Key, where the conductor asks for one.")
@click.option("--once", is_flag=True, help="Print once and leave (also when stdout is no terminal).")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: what the conductor says.")
def status(url: str, api_key: str, once: bool, interval: float, as_json: bool) -> None:
    """Show instances, store agents and index, live."""
    api = Api(url, api_key, timeout=10)
    try:
        cluster = api.get("/cluster")
    except ApiError as error:
        raise click.ClickException(error.message) from None
    if as_json:
        print_json(cluster)
    elif once or not out.is_terminal:
        out.print(render(cluster, url), width=None if out.is_terminal else WIDE)
    else:
        _live(api, cluster, interval)


def _live(api: Api, cluster: dict[str, Any], interval: float) -> None:
    """Goes on while the conductor is away; Ctrl-C ends it."""
    with Live(render(cluster, api.url), console=out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    live.update(render(api.get("/cluster"), api.url), refresh=True)
                except ApiError as error:
                    live.update(Text(error.message, style="red"), refresh=True)
        except KeyboardInterrupt:
            return
