"""``docs/evaluation.md``, from what the figures computed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from simulator.cost import A800_NODE, H800_NODE, LLAMA3_70B
from simulator.figures.figure import Figure, markdown

HEAD = """# Evaluation: the paper's figures, simulated

Written by `make figures` from the traces that it was given. `simulator/` replays them through a cluster in virtual time
whose conductors are the live ones' own scheduling objects; hardware is the paper's (LLaMA3-70B on nodes of eight A800),
its prefill and decode times fitted to Fig. 14. Everything else follows from the model; nothing is fitted to the other
figures, except where a section says so.

What is modelled: prefill queues, chunks and groups; KV streamed from prefill to decode while it is computed, over NICs
with a queue each way at both ends; fetches of prefixes over the same NICs; DRAM and SSD pools with LRU; continuous
batching whose steps depend on batch and contexts; load reports once a second, an index that lags, failures. What is
not: kernels, copies between host and device, tokenizing, the bus. Times between tokens are the mean of the longest 10 %
of a request's intervals, as in the paper. The paper's values were read off its plots.
"""


def page(figures: Sequence[Figure], data: Mapping[str, dict[str, Any]], stats: Mapping[str, Sequence[object]]) -> str:
    """Markdown; figures without data are left out."""
    parts = [HEAD, traces(stats), exact()]
    for one in figures:
        if one.name in data:
            title = f"Fig. {one.name}: {one.title}" if one.name.isdigit() else one.title
            parts.append(f"## {title}\n\n![{title}](figures/{stem(one)}.png)\n\n{wrapped(one.text(data[one.name]))}\n")
    return "\n".join(parts)


def wrapped(text: str) -> str:
    """Paragraphs in lines of 120; tables as they are."""
    parts = text.split("\n\n")
    return "\n\n".join(part if part.startswith("|") else textwrap.fill(" ".join(part.split()), 120) for part in parts)


def stem(one: Figure) -> str:
    return f"fig{one.name}" if one.name.isdigit() else one.name


def traces(stats: Mapping[str, Sequence[object]]) -> str:
    rows = [(name, *row) for name, row in stats.items()]
    head = ("trace", "requests", "input, mean", "output, mean", "arrivals (1/s)", "infinite cache, by token")
    return "## Traces\n\n" + markdown(head, rows) + "\n"


def exact() -> str:
    """What must come out exactly, and does."""
    model = LLAMA3_70B
    rows = [
        ("KV of a token", f"{model.bytes_per_token:,} B", "320 KiB"),
        ("Eq. 2, 8192 tokens, 8xA800", f"{model.break_even(8192, A800_NODE) / 1e9:.2f} GB/s", "6 GB/s"),
        ("Eq. 2, 8192 tokens, 8xH800", f"{model.break_even(8192, H800_NODE) / 1e9:.2f} GB/s", "19 GB/s"),
    ]
    return "## Arithmetic (section 2.2)\n\n" + markdown(("", "ours", "paper"), rows) + "\n"
