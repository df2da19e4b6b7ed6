"""What ``make bench-store`` prints: budgets, met or missed, and a table of speeds for each suite."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.report import Row


def show(rows: Sequence[Row]) -> None:
    console = Console(width=150, highlight=False)
    console.print(_budgets([row for row in rows if row.what.startswith("budget")]))
    suites = dict.fromkeys(row.what.split(":")[0] for row in rows if row.unit == "GiB/s")
    for suite in suites:
        console.print(_speeds(suite, [row for row in rows if row.what.startswith(suite + ":") and row.unit == "GiB/s"]))
    for row in rows:
        if row.unit != "GiB/s" and not row.what.startswith("budget"):
            value = "not run" if row.value is None else f"{row.value:.4g} {row.unit}"
            console.print(f"{row.what}, {row.contender}: {value} {row.note}".rstrip())


def _budgets(rows: Sequence[Row]) -> Table:
    table = Table(title="budgets: ratios within a round, median [quartiles]", title_justify="left", box=None)
    for column in ("budget", "who", "median", "quartiles", "n", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        outcome = {True: "met", False: "MISSED", None: "not judged"}[row.met]
        value = "-" if row.value is None else f"{row.value:.2f}"
        quartiles = " - ".join(f"{q:.2f}" for q in row.quartiles)
        note = f"{outcome} {row.note}".rstrip()
        table.add_row(row.what.removeprefix("budget, "), row.contender, value, quartiles, str(row.n), note)
    return table


def _speeds(suite: str, rows: Sequence[Row]) -> Table:
    title = f"{suite}: GiB/s, median; in brackets CPU seconds of all processes for a GiB"
    table = Table(title=title, title_justify="left", box=None)
    names = list(dict.fromkeys(row.contender for row in rows))
    for column in ("", *names):
        table.add_column(column, overflow="fold")
    for what in dict.fromkeys(row.what for row in rows):
        cells = {row.contender: _cell(row) for row in rows if row.what == what}
        table.add_row(what.split(": ", 1)[1], *(cells.get(name, "") for name in names))
    reasons = {f"{row.contender}: {row.note}": None for row in rows if row.value is None}
    table.caption, table.caption_justify = "\n".join(reasons), "left"
    return table


def _cell(row: Row) -> str:
    if row.value is None:
        return "not run"
    return f"{row.value:.2f} ({row.note.split(' ', 1)[0]})"
