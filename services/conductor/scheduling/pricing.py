"""Prices of prefill placements: the two branches of Algorithm 1, for all instances at once."""

from __future__ import annotations

import numpy as np

from services.conductor.scheduling.views import Ask, Floats, Ints, PrefillView, SourceView

Kind = tuple[int, int, float, float, float]
"""Of a source: blocks, those in DRAM, rate, rate of its SSD, backlog."""


def cached_tokens(ask: Ask, blocks: Floats) -> Floats:
    """Tokens that ``blocks`` spare; the last token of a prompt is always computed."""
    tokens: Floats = blocks * float(ask.block_size)
    return tokens if ask.blocks * ask.block_size < ask.tokens else np.minimum(tokens, ask.tokens - 1)


def promotion(ask: Ask, view: PrefillView) -> Floats:
    """Seconds until what the instance's node has on its SSD is read; that begins when the prompt is queued."""
    seconds: Floats = view.below * float(ask.block_bytes) / view.disk
    return seconds


def spared(ask: Ask, view: PrefillView, sources: SourceView) -> Floats:
    """The same, (source, instance), where the source sends from its DRAM what it has there of it and the disk reads the
    rest, without what the link has to do before; inf where the source has nothing of it."""
    sent = np.minimum(np.array(sources.dram)[:, None], view.here) - (view.here - view.below)
    per_block = (ask.block_bytes / np.array(sources.rate))[:, None]
    seconds = sent * per_block + (view.below - sent) * (float(ask.block_bytes) / view.disk)
    return np.where(sent > 0, seconds, np.inf)


def at_hand(ask: Ask, view: PrefillView, sources: SourceView) -> Floats:
    """Seconds until what the instance's node has on its SSD is in its DRAM: the node takes the quicker way."""
    read = promotion(ask, view)
    if not len(sources.agents) or not view.on_disk:
        return read
    behind = (np.array(sources.backlog) / np.array(sources.rate))[:, None] + view.inbound
    quickest: Floats = np.minimum(read, (spared(ask, view, sources) + behind).min(axis=0))
    return quickest


def recompute(
    ask: Ask, view: PrefillView, sources: SourceView, blocks: Floats, ready: Floats | float = 0.0
) -> tuple[Floats, Floats]:
    """(price, its part that is computing): queue, then a prefill that starts from ``blocks`` blocks at hand, which are
    there after ``ready`` seconds, those on the SSD when they are in DRAM."""
    start: Floats = view.queue if view.own is view.here else np.maximum(view.queue, ready)
    if view.on_disk:
        start = np.maximum(start, at_hand(ask, view, sources))
    work = view.seconds(ask.tokens, cached_tokens(ask, blocks))
    return start + work, work


def transfers(ask: Ask, view: PrefillView, sources: SourceView, source: int) -> Floats:
    """Seconds from now until the missing prefix is there, where that is not all there: behind what the source sends
    already and what is planned towards the instance; what is on the source's SSD is read there before it is sent."""
    blocks, dram, rate = sources.blocks[source], sources.dram[source], sources.rate[source]
    seconds: Floats = blocks - view.here
    seconds *= ask.block_bytes / rate
    if view.moving:
        seconds += view.inbound
    if sources.backlog[source]:
        seconds += sources.backlog[source] / rate
    if dram < blocks:
        seconds += (blocks - np.maximum(dram, view.here)) * (ask.block_bytes / sources.disk[source])
    return seconds


def transfer(ask: Ask, view: PrefillView, sources: SourceView, source: int, row: int) -> float:
    """The same for one instance."""
    blocks, here, rate = sources.blocks[source], int(view.here[row]), sources.rate[source]
    seconds = (blocks - here) * (ask.block_bytes / rate) + sources.backlog[source] / rate + float(view.inbound[row])
    return seconds + (blocks - max(sources.dram[source], here)) * (ask.block_bytes / sources.disk[source])


def worth_pricing(ask: Ask, view: PrefillView, sources: SourceView) -> list[int]:
    """Sources that may be the cheapest for somebody: those than which none before is better everywhere."""
    if len(sources.agents) == 1:
        return [0]
    linear, square = view.slopes()
    linear, square = max(linear, 0.0), max(square, 0.0)
    kinds: list[Kind] = list(
        zip(sources.blocks, sources.dram, sources.rate, sources.disk, sources.backlog, strict=True)
    )
    rows = [0]
    for row in range(1, len(kinds)):
        for other in rows:
            if _no_worse(ask, kinds[other], kinds[row], linear, square, view.on_disk):
                break
        else:
            rows.append(row)
    return rows


def _no_worse(ask: Ask, one: Kind, other: Kind, linear: float, square: float, on_disk: bool) -> bool:
    """A fetch from ``one`` costs no instance more than one from ``other``: they differ in nothing but backlog; or in
    what ``one`` has more, in DRAM, where to move that takes no longer than the fastest instance takes to compute it."""
    blocks, dram, rate, disk, backlog = one
    its_blocks, its_dram, its_rate, its_disk, its_backlog = other
    if rate != its_rate:
        return False
    if blocks == its_blocks and dram == its_dram and disk == its_disk:
        return backlog <= its_backlog
    if dram < blocks or blocks < its_blocks or on_disk:
        return False
    later = ((blocks - its_blocks) * float(ask.block_bytes) + backlog - its_backlog) / rate
    most = ask.tokens - 1
    cached, its = min(blocks * ask.block_size, most), min(its_blocks * ask.block_size, most)
    return later <= (cached - its) * (linear + square * (cached + its))


def fetch(ask: Ask, view: PrefillView, sources: SourceView, threshold: float) -> tuple[Floats, Floats, Ints | int]:
    """(price, its part that is computing, source row) of the cheapest fetch for each instance; where none is allowed
    inf, or no less than to compute. A fetch overlaps queueing, and is worth it only where it is ``threshold`` times
    longer than the own match. Needs a source."""
    least = None if forbids_itself(view, threshold) else np.maximum(threshold * view.own, view.here)
    instead = spared(ask, view, sources) if view.on_disk else None
    first, *others = worth_pricing(ask, view, sources)
    price, work = _fetch_from(ask, view, sources, first, least, instead)
    if not others:
        return price, work, first
    source: Ints = np.full(len(price), first, dtype=np.int64)
    for row in others:
        other, its_work = _fetch_from(ask, view, sources, row, least, instead)
        better = other < price
        np.copyto(price, other, where=better)
        np.copyto(work, its_work, where=better)
        source[better] = row
    return price, work, source


def _fetch_from(
    ask: Ask, view: PrefillView, sources: SourceView, source: int, least: Floats | None, instead: Floats | None
) -> tuple[Floats, Floats]:
    blocks = sources.blocks[source]
    work = view.seconds(ask.tokens, min(blocks * ask.block_size, ask.tokens - 1))
    ready = transfers(ask, view, sources, source)
    if instead is not None:
        ready = np.minimum(np.maximum(promotion(ask, view), ready), ready + instead[source])
    price = np.maximum(view.queue, ready)
    price += work
    if least is not None:
        price[least >= blocks] = np.inf
    return price, work


def forbids_itself(view: PrefillView, threshold: float) -> bool:
    """To fetch what is no longer than the own match never costs less than to compute: all of that is there at once, and
    a shorter prefix takes no instance less time."""
    return threshold == 1.0 and view.own is view.here and not view.on_disk and min(view.slopes()) >= 0.0
