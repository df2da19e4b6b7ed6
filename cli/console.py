"""What the command prints: results on stdout, everything else on stderr; colours on terminals only."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.text import Text

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One document, indented on a terminal and one line elsewhere."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, default=str), flush=True)


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
