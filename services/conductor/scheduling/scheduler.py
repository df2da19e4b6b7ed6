"""One decision: prefill instance, decode instance, admission."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.conductor.scheduling.decision import Decision, Prices, Rejection
from services.conductor.scheduling.policy import Policy
from services.conductor.scheduling.pricing import transfer
from services.conductor.scheduling.returning import NOTHING_KEPT, Kept, Lane, Shortage
from services.conductor.scheduling.tail import WINDOW_S, counted
from services.conductor.scheduling.urgency import harmless, later, latest, passed
from services.conductor.scheduling.views import Ask, Bools, DecodeView, Joined, PrefillView, SourceView, View

MAX_SOURCES = 3


@dataclass(frozen=True)
class Objectives:
    """Latency objectives in seconds; ``ttft`` counts from the request's arrival. ``held``: others are kept from slowing
    it down beyond this, once it decodes, where that is more than ``tbt``: what one client asks for must not keep all
    others away."""

    ttft: float
    tbt: float
    held: float = 0.0


class Scheduler:
    """Runs a policy and applies the objectives. Holds nothing. ``thrift``: see :func:`urgency.latest`."""

    def __init__(self, policy: Policy, thrift: float = 0.0) -> None:
        self.policy = policy
        self.thrift = thrift

    def decide(
        self, ask: Ask, view: View, objectives: Objectives | None, kept: Kept = NOTHING_KEPT
    ) -> Decision | Rejection:
        """``objectives`` None: place it however late it will be (it was accepted before). ``kept``: what it has to
        leave to others, who were told to come back."""
        if not np.count_nonzero(view.prefill.open):
            return Rejection("no_prefill")
        if not np.count_nonzero(view.decode.open):
            return Rejection("no_decode")
        view = in_turn(ask, view)
        prices = self.policy.price(ask, view.prefill, view.sources)
        room = with_room(ask, view.decode, objectives)
        if isinstance(room, Rejection):
            return replace(room, prices=prices)
        p = self.policy.choose(ask, prices)
        ttft = float(prices.price[p])
        wait = ask.waited + ttft + kept.seconds
        if objectives:
            limit = latest(objectives.ttft, float(prices.work[p]), self.thrift)
            predicted, limit = nearest((wait, objectives.ttft), (ask.waited + ttft, limit))
            if predicted > limit:
                shortage = too_late(view, float(prices.work[view.prefill.open].min()), predicted - limit, objectives)
                return Rejection("ttft", predicted, limit=limit, shortage=shortage, prices=prices)
        joined = view.decode.joined(ttft, ask.tokens + ask.expected_output / 2, ask.expected_output)
        allowed = in_time(joined, view.decode.tail, room, objectives)
        d = self.policy.choose_decode(view.decode, joined.step, allowed if np.count_nonzero(allowed) else room)
        if objectives and not enough(ask, view.decode, joined, allowed, objectives, kept):
            return replace(too_slow(ask, view.decode, joined, d, objectives), ttft=wait, prices=prices)
        return decision(ask, view, prices, p, view.decode.ids[d], float(joined.step[d]), objectives)


def in_turn(ask: Ask, view: View) -> View:
    """With the queues that it waits for, where it goes before others and nobody's promise is broken by that. It is as
    long as what it computes where nothing is fetched for it and nobody before it has computed anything of it."""
    turn, prefill = ask.turn, view.prefill
    if turn is None or prefill.last is None:
        return view
    rows: list[int] = (prefill.last > prefill.now + turn.due(0.0, ask.waited)).nonzero()[0].tolist()
    if not rows:
        return view
    queue = prefill.queue.copy()
    for row in rows:
        work = alone(ask, prefill, row)
        behind = later(prefill.standing[row], prefill.now + turn.due(work, ask.waited))
        if behind and harmless(behind, prefill.now + float(queue[row]), work):
            queue[row] = max(queue[row] - passed(behind), 0.0)
    return replace(view, prefill=replace(prefill, queue=queue))


def with_room(ask: Ask, view: DecodeView, objectives: Objectives | None) -> Bools | Rejection:
    """Which decode instances may be chosen, or why none. What exceeds an empty instance's promise gets all of it."""
    if view.room[view.room.argmin()] >= ask.total_blocks and view.total[view.total.argmin()] >= ask.least_blocks:
        return view.open  # everybody has room
    fits = view.total >= ask.least_blocks
    fits &= view.open
    room: Bools = view.room >= np.minimum(view.most, ask.total_blocks)
    room &= fits
    if np.count_nonzero(room):
        return room
    if np.count_nonzero(fits):
        return Rejection("no_room", shortage=leaving(view, objectives))
    return Rejection("does_not_fit")


def in_time(joined: Joined, tail: float, room: Bools, objectives: Objectives | None) -> Bools:
    """Of those with ``room``, the ones that keep everybody's objective: that of the request, and what those were
    promised that decode there already. Objectives are of the worst tenth of the intervals: a step and the ``tail``."""
    if not objectives and joined.promised is None:
        return room
    allowed = room
    if objectives:
        allowed = allowed & (joined.step <= objectives.tbt - counted(tail, objectives.tbt))
    if joined.promised is not None:
        allowed = allowed & (joined.pace <= joined.promised - counted(tail, joined.promised))
    return allowed


def nearest(kept: tuple[float, float], thrifty: tuple[float, float]) -> tuple[float, float]:
    """Of two predictions with their limits the one that is missed by more, or kept by less. What is kept for others is
    held against the objective, not against what thrift leaves of it: that may be less than what is kept, and an idle
    mesh would refuse what it can do."""
    return kept if kept[0] - kept[1] >= thrifty[0] - thrifty[1] else thrifty


def too_late(view: View, work: float, late: float, objectives: Objectives) -> Shortage:
    """By ``late`` seconds. ``work``: seconds of the prefill proper, the least that it takes of an empty mesh; what no
    empty mesh does in time is never accepted."""
    late = late if work <= objectives.ttft else np.inf
    return Shortage(Lane.PREFILL, late, work / np.count_nonzero(view.prefill.open), objectives.ttft)


def too_slow(ask: Ask, view: DecodeView, joined: Joined, d: int, objectives: Objectives) -> Rejection:
    """The objective that would be missed at the instance ``d``; where none would be, what is left is kept. What no idle
    instance would keep is never accepted, however long one waits; where only the tail is too much, that passes."""
    step, pace, shortage = float(joined.step[d]), float(joined.pace[d]), leaving(view, objectives)
    promised = np.inf if joined.promised is None else float(joined.promised[d])
    tail = counted(view.tail, objectives.tbt)
    if step > objectives.tbt - tail:
        alone = view.base + view.per_sequence + view.per_token * (ask.tokens + ask.expected_output / 2)
        if (least := float(alone[view.open].min())) > objectives.tbt:
            shortage = replace(shortage, late=np.inf)
        elif least + tail > objectives.tbt:
            shortage = replace(shortage, late=max(shortage.late, WINDOW_S))
        return Rejection("tbt", tbt=step + tail, limit=objectives.tbt, shortage=shortage)
    if pace > promised - (tail := counted(view.tail, promised)):
        return Rejection("tbt", tbt=pace + tail, limit=promised, shortage=shortage)
    return Rejection("no_room", tbt=step, shortage=shortage)


def enough(ask: Ask, view: DecodeView, joined: Joined, allowed: Bools, objectives: Objectives, kept: Kept) -> bool:
    """Whether there is one for it beside those that are ``kept``."""
    if not kept.requests:
        return bool(np.count_nonzero(allowed))
    cost = view.per_sequence + view.per_token * (ask.tokens + ask.expected_output / 2)
    limit = objectives.tbt if joined.promised is None else np.minimum(objectives.tbt, joined.promised)
    limit = limit - counted(view.tail, limit)
    more = np.minimum(view.limit - joined.batch, view.room / ask.total_blocks - 1)
    np.minimum(more, (limit - joined.step) / np.maximum(cost, 1e-9), out=more)
    return float(np.floor(more[allowed] + 1).sum()) > kept.requests


def leaving(view: DecodeView, objectives: Objectives | None) -> Shortage:
    """When a live request is expected to leave a decode instance, and how often one does."""
    leaves = view.live_leaves[view.live_leaves > 0]
    if not len(leaves):
        return Shortage(Lane.DECODE, 1.0, 1.0)
    lifetime = float((view.live_leaves - view.live_joins).mean())
    return Shortage(
        Lane.DECODE, float(leaves.min()), lifetime / len(view.live_leaves), objectives.ttft if objectives else 0.0
    )


def decision(
    ask: Ask, view: View, prices: Prices, p: int, decode: str, step: float, objectives: Objectives | None
) -> Decision:
    prefill, (fetch, row) = view.prefill, prices.fetch(p)
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
        tbt=step + view.decode.tail,
        step=step,
        prices=prices,
        promised=max(objectives.tbt, objectives.held) if objectives else np.inf,
        alone=float(prices.work[p]) if row >= 0 else alone(ask, prefill, p),
    )


def alone(ask: Ask, view: PrefillView, row: int) -> float:
    """Seconds of its prefill at one instance with what is there already."""
    cached = min(int(view.here[row]) * ask.block_size, ask.tokens - 1)
    each = float(view.linear[row]) + float(view.square[row]) * (ask.tokens + cached)
    return float(view.base[row]) + each * (ask.tokens - cached)


def sources_of(sources: SourceView, first: int) -> tuple[tuple[str, int], ...]:
    """The planned source, then others to fall back on; all of them when no fetch is planned (decode may want them)."""
    rows = [first] if first >= 0 else []
    rows += [row for row in range(len(sources.agents)) if row != first]
    return tuple([(sources.agents[row], sources.blocks[row]) for row in rows[:MAX_SOURCES]])
