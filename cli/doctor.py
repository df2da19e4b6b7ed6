"""``mooncake doctor``: what is installed, found and reachable on this machine, and what a mesh left behind."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import click
import msgspec
from rich.table import Table
from rich.text import Text

from cli.api import DEFAULT_URL
from cli.checks import Check, Targets, all_checks
from cli.console import out, print_json, table
from cli.leftovers import leftovers
from shared.config import CommonSettings

STYLES = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


@click.command()
@click.option("--url", default=DEFAULT_URL, envvar="MOONCAKE_URL", show_default=True, help="The conductor.")
@click.option("--nats", default=CommonSettings().nats, envvar="MOONCAKE_NATS", show_default=True, help="NATS server.")
@click.option(
    "--redis", default=CommonSettings().redis, envvar="MOONCAKE_REDIS", show_default=True, help="Redis server."
)
@click.option("--leftovers", "only_left", is_flag=True, help="List our processes, sockets, memory and files instead.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def doctor(url: str, nats: str, redis: str, only_left: bool, as_json: bool) -> None:
    """Say what is installed, found and reachable here. Exit code 1 when something that is needed is missing."""
    if only_left:
        _show_leftovers(as_json)
        return
    checks = all_checks(Targets(conductor=url, nats=nats, redis=redis))
    failed = any(check.state == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": [msgspec.structs.asdict(check) for check in checks]})
    else:
        out.print(shown(checks))
    sys.exit(1 if failed else 0)


def shown(checks: list[Check]) -> Table:
    found = table(("", "", ""))
    for check in checks:
        found.add_row(Text(check.state, style=STYLES[check.state]), check.name, Text(check.detail))
    return found


def _show_leftovers(as_json: bool) -> None:
    found = leftovers()
    if as_json:
        rows: list[dict[str, Any]] = [msgspec.structs.asdict(item) for item in found]
        print_json({"leftovers": rows, "counts": Counter(item.kind for item in found)})
    elif not found:
        out.print("nothing of ours is on this machine")
    for item in [] if as_json else found:
        out.print(Text(f"{item.kind:<8} {item.pid or '-':>8}  {item.what}"), soft_wrap=True)
