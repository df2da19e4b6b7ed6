"""A decode instance: KV lands, sequences join at step boundaries, steps are as long as batch and contexts make them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Chain
from dataclasses import dataclass, field

import numpy as np

from shared.messages import Load
from shared.workload.trace import BLOCK
from simulator.batch import Batch, Floats, Sequence
from simulator.clock import Clock
from simulator.link import Flow, Release
from simulator.node import Node
from simulator.pool import Hold
from simulator.request import Request


@dataclass(eq=False, slots=True)
class Landing:
    """One attempt at a decode instance. ``tokens``: the prompt, with outputs so far where it was moved. ``finished``:
    all tokens are made; ``lost``: the instance died. ``held``: blocks that were here already."""

    request: Request
    chain: tuple[int, ...]
    tokens: int
    joined: Callable[[Landing], None]
    finished: Callable[[Landing], None]
    lost: Callable[[Landing], None]
    room: int = 0
    held: Hold | None = None
    flows: list[Flow] = field(default_factory=list)
    landed: bool = False
    first_token: float = -1.0
    sequence: Sequence | None = None
    dead: bool = False


class DecodeInstance:
    """``caches``: what landed stays in the node's pool. ``tokens``: room for KV in HBM. ``handover``: seconds from the
    first token and the last of the KV until a sequence may join."""

    def __init__(
        self,
        id: str,
        clock: Clock,
        node: Node,
        batch: Batch,
        tokens: int,
        max_batch: int,
        caches: bool,
        handover: float = 0.0,
    ) -> None:
        self.id, self.clock, self.node, self.batch = id, clock, node, batch
        self._handover = handover
        self.alive = True
        self.landings: dict[Landing, None] = {}
        self._by_sequence: dict[Sequence, Landing] = {}
        self._total, self._max_batch, self._caches = tokens // BLOCK, max_batch, caches
        self._room = self._total
        self._waiting: deque[Landing] = deque()
        self._planned: Floats = np.empty(0)
        self._plan_number = 0
        self._steps = 0

    def load(self) -> Load:
        context = self.batch.context
        if len(self._planned):
            context += len(self.batch) * int(self._planned.searchsorted(self.clock.now, "right"))
        return Load(
            running=len(self.batch),
            kv_tokens=context,
            total_blocks=self._total,
            room_blocks=max(0, self._room),
            progress=self.batch.step,
            busy=len(self.batch) > 0,
        )

    def admit(self, landing: Landing) -> bool:
        """Room for its prompt and its answer; False where there is none."""
        blocks = -(-(landing.tokens + landing.request.output - landing.request.made) // BLOCK)
        if blocks > self._room and len(self.landings):
            return False
        landing.room = blocks
        self._room -= blocks
        self.landings[landing] = None
        if self._caches:
            landing.held = self.node.pool.hold(landing.chain[: self.node.pool.match(landing.chain)[0]])
        return True

    def receive(self, landing: Landing, nodes: Chain[Node], releases: list[list[Release]], size: int) -> None:
        """The stages compute: each streams what is not here yet, ``size`` bytes a token in all, while it does."""
        here = len(landing.held.chain) if landing.held else 0
        spared = min(here * BLOCK, landing.tokens) * (size // len(nodes))
        open_flows = [(node, without(stage, spared)) for node, stage in zip(nodes, releases, strict=True)]
        left = len(open_flows)

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                landing.landed = True
                self._ready(landing)

        for node, stage in open_flows:
            landing.flows.append(Flow(self.clock, node.nic, self.node.nic, stage, done, lambda: self._broken(landing)))

    def start(self, landing: Landing) -> None:
        """Its first token is drawn: it may join when everything has landed."""
        landing.first_token = self.clock.now
        if landing.request.made >= landing.request.output:
            self._end(landing)
        else:
            self._ready(landing)

    def forget(self, landing: Landing) -> None:
        """The attempt is over before it decoded, since its prefill instance died."""
        if landing in self.landings:
            landing.dead = True
            self._give_back(landing)

    def _broken(self, landing: Landing) -> None:
        """Who streams it died."""
        if not landing.dead:
            self.forget(landing)
            landing.lost(landing)

    def fail(self) -> None:
        self.alive = False
        if len(self._planned):
            self._advance(int(self._planned.searchsorted(self.clock.now, "right")))
        landings = list(self.landings)
        for landing in landings:
            landing.dead = True
            if landing.sequence:
                self._note(landing, landing.sequence)
            self._give_back(landing)
        self.batch.drop()
        self._by_sequence.clear()
        self._waiting.clear()
        self._planned = np.empty(0)
        self._plan_number += 1
        for landing in landings:
            landing.lost(landing)

    def revive(self) -> None:
        self.alive = True
        self._room = self._total

    def _ready(self, landing: Landing) -> None:
        if landing.dead or not landing.landed or landing.first_token < 0:
            return
        if self._caches:
            self.node.pool.put(landing.chain)
        if self._handover:
            self.clock.after(self._handover, self._queue, landing)
        else:
            self._queue(landing)

    def _queue(self, landing: Landing) -> None:
        """It may join from the next step on."""
        if landing.dead:
            return
        self._waiting.append(landing)
        if not len(self._planned):
            self._boundary()
        elif len(self.batch) < self._max_batch:
            self._cut()

    def _cut(self) -> None:
        """Somebody waits: plan anew from the end of the step that runs now."""
        kept = int(self._planned.searchsorted(self.clock.now, "left")) + 1
        if kept < len(self._planned):
            self._planned = self._planned[:kept]
            self._schedule()

    def _schedule(self) -> None:
        self._plan_number += 1
        self.clock.at(float(self._planned[-1]), self._over, self._plan_number)

    def _over(self, number: int) -> None:
        if number == self._plan_number:
            self._advance(len(self._planned))
            self._boundary()

    def _advance(self, steps: int) -> None:
        self.batch.advance(self._planned[:steps])
        self._planned = np.empty(0)

    def _boundary(self) -> None:
        for sequence in self.batch.leave():
            landing = self._by_sequence.pop(sequence)
            self._note(landing, sequence)
            self._end(landing)
        while self._waiting and len(self.batch) < self._max_batch:
            self._join(self._waiting.popleft())
        if len(self.batch):
            self._planned = self.batch.plan(self.clock.now)
            self._schedule()

    def _join(self, landing: Landing) -> None:
        if landing.dead:
            return
        request = landing.request
        sequence = Sequence(request, landing.tokens + 1, request.output - request.made)
        landing.sequence = sequence
        self._by_sequence[sequence] = landing
        self.batch.join(sequence)
        landing.joined(landing)

    def _note(self, landing: Landing, sequence: Sequence) -> None:
        """Its tokens so far, and the intervals between them."""
        ends = self.batch.ends(sequence)
        landing.request.made += len(ends)
        landing.request.last_token = float(ends[-1]) if len(ends) else landing.first_token
        intervals = ends.copy()
        intervals[1:] -= ends[:-1]
        intervals[:1] -= landing.first_token
        landing.request.intervals.append(intervals)

    def _end(self, landing: Landing) -> None:
        self._give_back(landing)
        landing.finished(landing)

    def _give_back(self, landing: Landing) -> None:
        for flow in landing.flows:
            flow.cancel()
        if self.landings.pop(landing, self) is None:
            self._room += landing.room
            if landing.held:
                self.node.pool.release(landing.held)
                landing.held = None


def without(releases: list[Release], spared: int) -> list[Release]:
    """Bytes that need not be sent: those of the first blocks, whenever they would be there."""
    left = [(when, upto - spared) for when, upto in releases if upto > spared]
    return left or [(0.0, 0)]
