"""One decision: prefill instance, decode instance, admission."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.conductor.scheduling.decision import Decision, Prices, Rejection
from services.conductor.scheduling.policy import Policy
from services.conductor.scheduling.pricing import transfer
from services.conductor.scheduling.views import Ask, Bools, DecodeView, SourceView, View

MAX_SOURCES = 3
SHORTEST_RETRY = 0.25


@dataclass(frozen=True)
class Objectives:
    """Latency objectives in seconds; ``ttft`` counts from the request's arrival."""

    ttft: float
    tbt: float


class Scheduler:
    """Runs a policy and applies the objectives. Holds nothing."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def decide(self, ask: Ask, view: View, objectives: Objectives | None) -> Decision | Rejection:
        """``objectives`` None: place it however late it will be (it was accepted before)."""
        if not np.count_nonzero(view.prefill.open):
            return Rejection("no_prefill")
        if not np.count_nonzero(view.decode.open):
            return Rejection("no_decode")
        prices = self.policy.price(ask, view.prefill, view.sources)
        room = with_room(ask, view.decode)
        if isinstance(room, Rejection):
            return replace(room, prices=prices)
        p = self.policy.choose(ask, prices)
        ttft = float(prices.price[p])
        steps = view.decode.steps(ttft, ask.tokens + ask.expected_output / 2)
        d = self.policy.choose_decode(view.decode, steps, room)
        tbt = float(steps[d])
        if objectives and ask.waited + ttft > objectives.ttft:
            late = ask.waited + ttft - objectives.ttft
            return Rejection("ttft", max(late, SHORTEST_RETRY), ask.waited + ttft, tbt, prices)
        if objectives and tbt > objectives.tbt:
            return Rejection("tbt", next_leave(view.decode), ask.waited + ttft, tbt, prices)
        return decision(ask, view, prices, p, view.decode.ids[d], tbt)


def with_room(ask: Ask, view: DecodeView) -> Bools | Rejection:
    """Which decode instances may be chosen, or why none. What exceeds an empty instance's promise gets all of it."""
    fits = view.total >= ask.least_blocks
    fits &= view.open
    room: Bools = view.room >= np.minimum(view.most, ask.total_blocks)
    room &= fits
    if np.count_nonzero(room):
        return room
    return Rejection("no_room", next_leave(view)) if np.count_nonzero(fits) else Rejection("does_not_fit")


def next_leave(view: DecodeView) -> float:
    """Seconds until a live request is expected to leave a decode instance."""
    leaves = view.live_leaves[view.live_leaves > 0]
    return max(float(leaves.min()), SHORTEST_RETRY) if len(leaves) else 1.0


def decision(ask: Ask, view: View, prices: Prices, p: int, decode: str, tbt: float) -> Decision:
    prefill, row, fetch = view.prefill, int(prices.source[p]), int(prices.fetch[p])
    prefix = fetch if row >= 0 else int(prefill.own[p])
    return Decision(
        prefill=prefill.ids[p],
        decode=decode,
        fetch_blocks=fetch,
        sources=sources_of(view.sources, row),
        prefix_blocks=prefix,
        queue=float(prefill.queue[p]),
        compute=float(prices.work[p]),
        transfer=transfer(ask, prefill, view.sources, row, p) if row >= 0 else 0.0,
        ttft=float(prices.price[p]),
        tbt=tbt,
        prices=prices,
    )


def sources_of(sources: SourceView, first: int) -> tuple[tuple[str, int], ...]:
    """The planned source, then others to fall back on; all of them when no fetch is planned (decode may want them)."""
    rows = [first] if first >= 0 else []
    rows += [row for row in range(len(sources.agents)) if row != first]
    return tuple((sources.agents[row], int(sources.blocks[row])) for row in rows[:MAX_SOURCES])
