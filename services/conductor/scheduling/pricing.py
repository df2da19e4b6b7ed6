"""Prices of prefill placements: the two branches of Algorithm 1, for all instances at once."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.views import Ask, Floats, Ints, PrefillView, SourceView


def cached_tokens(ask: Ask, blocks: Ints) -> Ints:
    """Tokens that ``blocks`` spare; the last token of a prompt is always computed."""
    return np.minimum(blocks * ask.block_size, ask.tokens - 1)


def promotion(ask: Ask, view: PrefillView) -> Floats:
    """Seconds until what the instance's node has on its SSD is in DRAM; that begins when the prompt is queued."""
    seconds: Floats = view.below * float(ask.block_bytes) / view.disk
    return seconds


def recompute(ask: Ask, view: PrefillView, blocks: Ints, ready: Floats | float = 0.0) -> Floats:
    """Queue, then a prefill that starts from ``blocks`` blocks at hand, which are there after ``ready`` seconds, those
    on the SSD when they are read."""
    start: Floats = np.maximum(np.maximum(view.queue, ready), promotion(ask, view))
    return start + view.seconds(ask.tokens, cached_tokens(ask, blocks))


def transfers(ask: Ask, view: PrefillView, sources: SourceView) -> Floats:
    """Seconds from now until the missing prefix is there, (source, instance): behind what the source sends already
    and what is planned towards the instance; what is on the source's SSD is read there before it is sent."""
    missing = np.maximum(sources.blocks[:, None] - view.here, 0)
    per_block, behind = ask.block_bytes / sources.rate, sources.backlog / sources.rate
    seconds: Floats = missing * per_block[:, None] + behind[:, None] + view.inbound
    if (sources.dram < sources.blocks).any():
        below = np.maximum(sources.blocks[:, None] - np.maximum(sources.dram[:, None], view.here), 0)
        seconds += below * (ask.block_bytes / sources.disk)[:, None]
    return seconds


def fetch(ask: Ask, view: PrefillView, sources: SourceView, threshold: float) -> tuple[Floats, Ints]:
    """Price and source row of the cheapest fetch for each instance (inf where none is allowed). A fetch overlaps
    queueing, and is worth it only where it is ``threshold`` times longer than the own match. Needs a source."""
    blocks = sources.blocks[:, None]
    price = np.maximum(np.maximum(view.queue, promotion(ask, view)), transfers(ask, view, sources))
    price += view.seconds(ask.tokens, cached_tokens(ask, blocks))
    price[blocks <= np.maximum(threshold * view.own, view.here)] = np.inf
    source = price.argmin(axis=0)
    return price[source, np.arange(len(source))], source
