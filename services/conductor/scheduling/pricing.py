"""Prices of prefill placements: the two branches of Algorithm 1, for all instances at once."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.views import Ask, Floats, Ints, PrefillView, SourceView


def cached_tokens(ask: Ask, blocks: Ints) -> Ints:
    """Tokens that ``blocks`` spare; the last token of a prompt is always computed."""
    return np.minimum(blocks * ask.block_size, ask.tokens - 1)


def promotion(ask: Ask, view: PrefillView) -> Floats:
    """Seconds until what the instance's node has on its SSD is read; that begins when the prompt is queued."""
    seconds: Floats = view.below * float(ask.block_bytes) / view.disk
    return seconds


def spared(ask: Ask, view: PrefillView, sources: SourceView) -> Floats:
    """The same, (source, instance), where the source sends from its DRAM what it has there of it and the disk reads the
    rest, without what the link has to do before; inf where the source has nothing of it."""
    sent = np.minimum(sources.dram[:, None], view.here) - (view.here - view.below)
    per_block = (ask.block_bytes / sources.rate)[:, None]
    seconds = sent * per_block + (view.below - sent) * (float(ask.block_bytes) / view.disk)
    return np.where(sent > 0, seconds, np.inf)


def at_hand(ask: Ask, view: PrefillView, sources: SourceView) -> Floats:
    """Seconds until what the instance's node has on its SSD is in its DRAM: the node takes the quicker way."""
    read = promotion(ask, view)
    if not len(sources.agents) or not view.below.any():
        return read
    behind = (sources.backlog / sources.rate)[:, None] + view.inbound
    quickest: Floats = np.minimum(read, (spared(ask, view, sources) + behind).min(axis=0))
    return quickest


def recompute(ask: Ask, view: PrefillView, sources: SourceView, blocks: Ints, ready: Floats | float = 0.0) -> Floats:
    """Queue, then a prefill that starts from ``blocks`` blocks at hand, which are there after ``ready`` seconds, those
    on the SSD when they are in DRAM."""
    start: Floats = np.maximum(np.maximum(view.queue, ready), at_hand(ask, view, sources))
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
    moved = transfers(ask, view, sources)
    ready = np.maximum(promotion(ask, view), moved)
    if view.below.any():
        ready = np.minimum(ready, moved + spared(ask, view, sources))
    price = np.maximum(view.queue, ready)
    price += view.seconds(ask.tokens, cached_tokens(ask, blocks))
    price[blocks <= np.maximum(threshold * view.own, view.here)] = np.inf
    source = price.argmin(axis=0)
    return price[source, np.arange(len(source))], source
