"""What the command prints: results on stdout, everything else on stderr; colours on terminals only."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")

NAME = "mooncake"
WIDE = 1000
"""Columns where there is no terminal: what is piped or kept is never cut off."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, highlight=False)


BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in BINARY:
        if abs(count) < 1024 or unit == BINARY[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def table(left: Sequence[str], right: Sequence[str] = (), title: str | None = None) -> Table:
    """Without lines; names on the left, numbers on the right. Where it is narrow, names are folded, never cut off."""
    made = Table(title=title, title_justify="left", box=None, show_header=any((*left, *right)))
    for justify, names in (("left", left), ("right", right)):
        for name in names:
            made.add_column(name, justify=cast(JustifyMethod, justify), overflow="fold")
    return made


def print_json(value: Any) -> None:
    """One document, indented on a terminal and one line elsewhere."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, default=str), flush=True)


def typed() -> str:
    """How somebody calls this command from here: by its name where the shell finds it, else by its path."""
    if shutil.which(NAME) or Path(sys.argv[0]).name != NAME:
        return NAME
    path = os.path.relpath(sys.argv[0])
    return shlex.quote(os.path.abspath(path) if path.startswith("..") else path)


def redis_option(url: str) -> str:
    """``--redis URL``, to paste; a password is not for the screen."""
    return '--redis "$MOONCAKE_REDIS"' if "@" in url else f"--redis {shlex.quote(url)}"


class Lines:
    """Log lines of many processes on stderr, each with the name of its process in a colour of its own."""

    def __init__(self, hidden: Collection[str] = (), width: int = 12) -> None:
        """``hidden``: processes whose lines are not shown; what happens to them is."""
        self.hidden = hidden
        self.width = width
        self._colours: dict[str, str] = {}

    def line(self, name: str, text: str) -> None:
        if name not in self.hidden:
            err.print(self._prefix(name) + Text.from_ansi(text), soft_wrap=True)

    def event(self, name: str, text: str, bad: bool = False) -> None:
        err.print(self._prefix(name) + Text(text, style="bold red" if bad else "bold"), soft_wrap=True)

    def _prefix(self, name: str) -> Text:
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        return Text(f"{name:<{self.width}} | ", style=colour)
