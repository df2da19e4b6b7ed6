"""What a policy sees: plain columns, one row an instance, times in seconds from now.

Views made by the ledger share its arrays: they hold until the ledger is changed, that is, for one decision. Nobody
changes one; they are not frozen because that makes each field a call when they are made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.conductor.scheduling.urgency import Standing, Turn

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

UNLIMITED = 2**40
"""Blocks; of an instance that has not reported its pool."""
WORST = 0.1
"""Share of a request's intervals whose mean is its time between tokens."""


@dataclass(frozen=True)
class Ask:
    """One request to place. ``tokens`` counts the whole prompt (after a migration the outputs so far too), ``blocks``
    its full blocks. ``waited``: seconds since it arrived. ``turn``: its place in prefill's queue (None: at the end)."""

    tokens: int
    blocks: int
    block_size: int
    block_bytes: int
    expected_output: int
    waited: float = 0.0
    turn: Turn | None = None

    @property
    def total_blocks(self) -> int:
        """Blocks that a decode instance should have room for: prompt and expected output."""
        return -(-(self.tokens + self.expected_output) // self.block_size)

    @property
    def least_blocks(self) -> int:
        """Blocks without which nothing of it can be decoded."""
        return -(-(self.tokens + 1) // self.block_size)


def prefill_seconds(base: Floats, linear: Floats, square: Floats, tokens: int, cached: Floats | int) -> Floats:
    """Time to prefill ``tokens`` tokens of which ``cached`` are there, by models as columns (shared/latency.py)."""
    seconds: Floats = square * (tokens + cached)
    seconds += linear
    seconds *= tokens - cached
    seconds += base
    return seconds


@dataclass(slots=True)
class PrefillView:
    """Prefill instances. ``here``: blocks of this prompt committed in the instance's pool (whole numbers, as floats
    they mix with times faster); ``own`` (>= here): those that will be there when earlier requests of its queue are
    done, after ``ready`` seconds; ``here`` itself where nothing is promised. ``below``: blocks of ``here`` that are on
    its node's SSD, read at ``disk`` bytes per second. ``queue``: seconds until a new prompt would start. ``inbound``:
    seconds of transfers already planned towards it. ``open``: may be chosen. ``turn``: when it was last chosen (a
    counter). ``on_disk``: there may be any ``below``; ``moving``: there may be any ``inbound``. ``fastest``: the least
    ``linear`` and ``square`` (None: nobody has looked). ``standing``: what is known of each queue, by the clock that
    says ``now``; ``last``: when the last of each is due (None: nobody knows of any)."""

    ids: Sequence[str]
    agents: Sequence[str]
    queue: Floats
    base: Floats
    linear: Floats
    square: Floats
    here: Floats
    own: Floats
    ready: Floats
    below: Ints
    disk: Floats
    inbound: Floats
    open: Bools
    turn: Ints
    on_disk: bool = True
    moving: bool = True
    fastest: tuple[float, float] | None = None
    standing: Sequence[Collection[Standing]] = ()
    now: float = 0.0
    last: Floats | None = None

    def slopes(self) -> tuple[float, float]:
        """The least ``linear`` and ``square`` of all."""
        return self.fastest or (float(self.linear.min()), float(self.square.min()))

    def seconds(self, tokens: int, cached: Floats | int) -> Floats:
        """As :func:`prefill_seconds`; ``cached`` is broadcast against the rows."""
        return prefill_seconds(self.base, self.linear, self.square, tokens, cached)


@dataclass(slots=True)
class SourceView:
    """Agents that hold a prefix of this prompt, best first: few, so plain lists. ``blocks``: how long it is there,
    ``dram`` of them before the first that is on its SSD, read at ``disk`` bytes per second. ``rate``: bytes per second
    of its link; ``backlog``: bytes queued on it. ``prefill``: it serves a prefill instance."""

    agents: Sequence[str]
    blocks: Sequence[int]
    dram: Sequence[int]
    disk: Sequence[float]
    rate: Sequence[float]
    backlog: Sequence[float]
    prefill: Sequence[bool]

    @staticmethod
    def none() -> SourceView:
        return SourceView((), (), (), (), (), (), ())


@dataclass(slots=True)
class Joined:
    """Decode instances once a request has joined. ``pace``: seconds of a step; ``step``: what the request sees between
    its tokens as a rule, with its wait for a place in the batch. ``batch``: sequences, those that wait included.
    ``promised``: what the strictest of them was promised (None: nobody is known)."""

    batch: Floats
    pace: Floats
    step: Floats
    promised: Floats | None


@dataclass(slots=True)
class DecodeView:
    """Decode instances, and the live requests that this conductor has placed on them.

    ``running``, ``kv_tokens``: sequences of others (known from reports only) and the tokens they attend to. ``room``:
    blocks that may still be promised; ``most``: that of the instance when it is empty; ``total``: of its pool;
    UNLIMITED where unknown. ``limit``: sequences in a batch, inf where unknown. ``assigned``: live requests placed
    there. The ``live_*`` columns have one row a live request: its instance's row, when it joins and leaves (seconds
    from now), its tokens, the step that it was promised at most (inf: nothing). ``tail``: seconds by which the worst
    tenth of a request's intervals exceeds a step.
    """

    ids: Sequence[str]
    base: Floats
    per_sequence: Floats
    per_token: Floats
    running: Floats
    kv_tokens: Floats
    room: Ints
    total: Ints
    most: Ints
    limit: Floats
    assigned: Ints
    open: Bools
    turn: Ints
    live_row: Ints
    live_joins: Floats
    live_leaves: Floats
    live_tokens: Floats
    live_promised: Floats
    tail: float = 0.0

    def joined(self, at: float, tokens: float, output: float = 1.0) -> Joined:
        """Each instance at ``at`` seconds from now, with a sequence of ``tokens`` tokens added: those that will have
        finished by then are gone, and those are there whose prompts will have been computed. ``output``: tokens that
        it will draw."""
        batch, attended, promised = self.running + 1, self.kv_tokens + tokens, None
        if len(self.live_row):
            leaving = (self.live_leaves > 0) & (self.live_leaves <= at)
            there = (self.live_joins <= at) & ~leaving
            rows, size = self.live_row[there], len(self.ids)
            batch = batch + np.bincount(rows, minlength=size)
            attended = attended + np.bincount(rows, weights=self.live_tokens[there], minlength=size)
            promised = np.full(size, np.inf)
            np.minimum.at(promised, rows, self.live_promised[there])
        pace: Floats = self.per_sequence * batch
        pace += self.base
        attended *= self.per_token
        pace += attended
        return Joined(batch, pace, self._waiting(pace, batch, output), promised)

    def _waiting(self, pace: Floats, batch: Floats, output: float) -> Floats:
        """Who finds the batch full waits until enough have left, once. The time between tokens that counts is the mean
        of the worst tenth, so that wait counts by as many parts. Where nobody waits, ``pace`` itself."""
        if not len(self.live_row):
            return pace
        over: Floats = np.maximum(batch - self.limit, 0.0)
        if not np.count_nonzero(over):
            return pace
        lifetime = float((self.live_leaves - self.live_joins).mean())
        return pace + over * lifetime / self.limit / max(1.0, output * WORST)


@dataclass(slots=True)
class View:
    prefill: PrefillView
    decode: DecodeView
    sources: SourceView


def without(open: Bools, rows: Mapping[str, int], closed: Collection[str]) -> Bools:
    """``open``, less the rows of the ``closed`` ids."""
    if not closed:
        return open
    left = open.copy()
    left[[rows[id] for id in closed if id in rows]] = False
    return left
