"""Prices of prefill placements: the two branches of Algorithm 1, for all instances at once."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.views import Ask, Floats, Ints, PrefillView, SourceView


def cached_tokens(ask: Ask, blocks: Ints) -> Ints:
    """Tokens that ``blocks`` spare; the last token of a prompt is always computed."""
    return np.minimum(blocks * ask.block_size, ask.tokens - 1)


def recompute(ask: Ask, view: PrefillView, blocks: Ints, ready: Floats | float = 0.0) -> Floats:
    """Queue, then a prefill that starts from ``blocks`` blocks at hand, which are there after ``ready`` seconds."""
    return np.maximum(view.queue, ready) + view.seconds(ask.tokens, cached_tokens(ask, blocks))


def transfers(ask: Ask, view: PrefillView, sources: SourceView) -> Floats:
    """Seconds from now until the missing prefix is there, (source, instance): behind what the source sends already
    and what is planned towards the instance."""
    missing = np.maximum(sources.blocks[:, None] - view.here[None, :], 0) * float(ask.block_bytes)
    seconds: Floats = (sources.backlog[:, None] + missing) / sources.rate[:, None] + view.inbound[None, :]
    return seconds


def ratio_exceeds(best: Ints, own: Ints, threshold: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """``best / own > threshold``, where the ratio is infinite for ``own == 0 < best`` and 1 when both are 0."""
    return np.where(own > 0, best > threshold * own, (best > 0) | (threshold < 1.0))


def fetch(ask: Ask, view: PrefillView, sources: SourceView, threshold: float) -> tuple[Floats, Ints]:
    """Price and source row of the cheapest fetch for each instance (inf where none is allowed). A fetch overlaps
    queueing. Without sources: all inf."""
    if not len(sources.agents):
        return np.full(len(view.ids), np.inf), np.full(len(view.ids), -1, dtype=np.int64)
    blocks = sources.blocks[:, None]
    compute = view.seconds(ask.tokens, cached_tokens(ask, blocks))
    price = np.maximum(view.queue[None, :], transfers(ask, view, sources)) + compute
    allowed = ratio_exceeds(blocks, view.own[None, :], threshold) & (blocks > view.here[None, :])
    price = np.where(allowed, price, np.inf)
    source = price.argmin(axis=0)
    return price[source, np.arange(len(view.ids))], source
