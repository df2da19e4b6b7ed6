"""``mooncake status``: the mesh as live tables, from the conductor's ``GET /cluster``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.api import DEFAULT_URL, Api, ApiError, hinted
from cli.console import bytes_text, out, print_json, table

GOOD = {"ready", "ok", "live", "alive", "healthy"}


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
    counts = ("queued", "running", "KV tokens", "free blocks")
    shown = table(("instance", "role", "node", "state"), counts, "Instances")
    for record in sorted(records, key=lambda r: (str(r.get("role")), name_of(r))):
        load = record.get("load") or {}
        queued = cell(load.get("queued", 0)) + (f" ({tokens} tok)" if (tokens := load.get("queued_tokens")) else "")
        known = record.get("role") == "decode" and "room_blocks" in load  # only decode promises blocks
        room = f"{load['room_blocks']}/{load.get('total_blocks', 0)}" if known else "-"
        numbers = [queued, cell(load.get("running", 0)), cell(load.get("kv_tokens", 0)), room]
        role, node = cell(record.get("role")), cell(record.get("node"))
        shown.add_row(name_of(record), role, node, state_of(record), *numbers)
    return shown


def agents(records: Iterable[dict[str, Any]], indexed: Any) -> Table:
    """``indexed``: blocks that the index has of each agent, by its code. What is cached can be evicted; what is in use
    cannot."""
    shown = table(("agent", "node"), ("cached blocks", "in use", "slots", "pool", "to send", "held"), "Store agents")
    for record in sorted(records, key=name_of):
        used, slots = int(record.get("used") or 0), int(record.get("slots") or 0)
        pool = bytes_text(slots * int(record.get("slot_bytes") or 0)) if slots else "-"
        backlog = bytes_text(int(record.get("backlog_bytes") or 0))
        cached = cell(indexed.get(str(record.get("code")), 0) if isinstance(indexed, dict) else None)
        counts = [cached, f"{used} ({100 * used / max(slots, 1):.0f} %)", str(slots), pool, backlog]
        shown.add_row(name_of(record), cell(record.get("node")), *counts, held(record.get("held")))
    return shown


def held(amounts: Any) -> str:
    """``leases 2 pinned 5``: what an agent must not forget; the connections that it always has are left out."""
    amounts = amounts if isinstance(amounts, dict) else {}
    short = {str(name).removeprefix("store_"): amount for name, amount in amounts.items()}
    return cell({name: amount for name, amount in short.items() if name not in ("connections", "slots")})


def ssd_tiers(records: Iterable[dict[str, Any]]) -> list[Table]:
    """One table, of the agents that have such a tier; none where nobody has."""
    counts = ("blocks", "on disk", "hits", "written", "lost", "read/s", "write/s")
    shown = table(("agent", "state"), counts, "SSD tiers")
    for record in sorted((r for r in records if r.get("ssd")), key=name_of):
        ssd = record["ssd"]
        size = f"{bytes_text(ssd.get('bytes', 0))}/{bytes_text(ssd.get('capacity', 0))}"
        numbers = [cell(ssd.get(name, 0)) for name in ("read", "written", "lost")]
        rates = [bytes_text(ssd[name]) if ssd.get(name) else "-" for name in ("read_rate", "write_rate")]
        state = Text(str(ssd.get("state")), style="green" if ssd.get("state") == "on" else "red")
        shown.add_row(name_of(record), state, cell(ssd.get("blocks", 0)), size, *numbers, *rates)
    return [shown] if shown.row_count else []


def conductor(cluster: dict[str, Any]) -> str:
    """``ready, policy paper``, or why it is not."""
    reasons, degraded = cell(cluster.get("reasons")), cell(cluster.get("degraded"))
    words = ["ready" if cluster.get("ready") else f"not ready: {reasons}"]
    words += [f"degraded: {degraded}"] if degraded != "-" else []
    return ", ".join([*words, f"policy {cell(cluster.get('policy'))}"])


def index(about: dict[str, Any]) -> str:
    """``42 blocks, 0.1 s behind``."""
    blocks = about.get("blocks") or {}
    count = sum(blocks.values()) if isinstance(blocks, dict) else blocks
    behind = f"{about.get('lag_s') or 0:.1f} s behind" if about.get("synced") else "not synced"
    return f"{count} blocks, {behind}"


def requests(counts: dict[str, Any]) -> str:
    """Those running, and each kind of the others that there was."""
    others = [f"{count} {kind}" for kind, count in counts.items() if count and kind != "running"]
    return ", ".join([f"{counts.get('running', 0)} running", *others])


def balance(roles: dict[str, Any]) -> str:
    """By role, how much more the busiest instance did than all did on average."""
    known = {role: work["ratio"] for role, work in roles.items() if work and "ratio" in work}
    return ", ".join(f"{role} {ratio:.2f}" for role, ratio in known.items()) or "-"


def keeper(about: dict[str, Any]) -> str:
    """``2 prefixes, 5 copies, by conductor-0``."""
    who = about.get("conductor")
    return f"{about.get('chains', 0)} prefixes, {about.get('copies', 0)} copies, by {who}" if who else "nobody's"


def conductors(records: list[dict[str, Any]]) -> str:
    """``conductor-0, conductor-1 (not heard)``."""
    return ", ".join(cell(one.get("id")) + ("" if one.get("heard") else " (not heard)") for one in records) or "-"


TOPICS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "conductors": ("conductors", conductors),
    "keeper": ("hot prefixes", keeper),
    "index": ("index", index),
    "requests": ("requests", requests),
    "balance": ("busiest / mean", balance),
}


def nics(records: Iterable[dict[str, Any]]) -> list[Table]:
    """One table of RDMA devices; none where no agent uses any."""
    shown = table(
        ("agent", "NIC", "state", "address"), ("pairs", "queued", "read", "written", "broken"), "RDMA devices"
    )
    for record in sorted(records, key=name_of):
        for nic in record.get("nics") or []:
            state = Text(str(nic.get("state")), style="green" if nic.get("state") == "active" else "red")
            sizes = [bytes_text(nic.get(name, 0)) for name in ("queued", "read", "written")]
            counts = cell(nic.get("pairs", 0)), *sizes, cell(nic.get("broken", 0))
            shown.add_row(name_of(record), cell(nic.get("name")), state, cell(nic.get("gid")), *counts)
    return [shown] if shown.row_count else []


def render(cluster: dict[str, Any], url: str) -> RenderableType:
    """The tables, then what the conductor tells of itself, one line a topic."""
    served = str((cluster.get("gateway") or {}).get("model") or "")
    parts: list[RenderableType] = [Text(f"{served} at {url}  {time.strftime('%H:%M:%S')}".strip(), style="dim")]
    stores = cluster.get("agents") or []
    indexed = (cluster.get("index") or {}).get("blocks")
    parts += [instances(cluster.get("instances") or []), agents(stores, indexed), *ssd_tiers(stores), *nics(stores)]
    parts.append(Text.assemble(("conductor: ", "bold"), conductor(cluster)))
    for topic, (name, words) in TOPICS.items():
        parts.append(Text.assemble((f"{name}: ", "bold"), words(cluster.get(topic) or {})))
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
        raise click.ClickException(hinted(error)) from None
    if as_json:
        print_json(cluster)
    elif once or not out.is_terminal:
        out.print(render(cluster, url))
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
