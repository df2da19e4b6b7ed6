"""One figure: what is run for it, how it is drawn, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.workload.trace import TraceRequest

Traces = Mapping[str, Sequence[TraceRequest]]
"""Name (conversation, synthetic, toolagent) -> its requests, those at one instant spread until the next."""

Known = Mapping[str, dict[str, Any]]
"""What earlier figures computed, by their numbers."""

PAPER_CLUSTER: dict[str, Any] = {"policy": "paper", "decode_cache": False}
"""Algorithm 1 literally, caches at prefill nodes only, the whole KV from prefill to decode."""


@dataclass(frozen=True)
class Figure:
    """``compute(traces, known)``: JSON-able figures of ours. ``draw(data, path)``. ``text(data)``: Markdown below it.
    ``needs``: without one of these traces there is nothing to compute."""

    name: str
    title: str
    needs: tuple[str, ...]
    compute: Callable[[Traces, Known], dict[str, Any]]
    draw: Callable[[dict[str, Any], Path], None]
    text: Callable[[dict[str, Any]], str]


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; floats with three digits."""
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in lines)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
